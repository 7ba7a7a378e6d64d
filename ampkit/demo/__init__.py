"""`ampkit demo`: fp32, torch.amp and ampkit trained side by side on data that ships with installed packages.

Rooms: `data` and `models` are what is trained, `tasks` pairs them, `lanes` are the three ways to train,
`training` steps the lanes in turn, `progress` shows them live, `results`, `table` and `plot` say what came
out, and `cli` reads the command line.
"""
