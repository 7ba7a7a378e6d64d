"""Trains an equivariant graph network to predict where bodies move, with the repository's layers."""

import argparse

import torch
from egnn_clean import EGNN, get_edges_batch
from torch.nn import functional

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="float16")
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()
dtype = getattr(torch, options.dtype)
torch.manual_seed(options.seed)

bodies, batch_size = 5, 16
edges, _ = get_edges_batch(bodies, batch_size)
rows, columns = edges
charges = torch.randint(0, 2, (96, bodies, 1)) * 2.0 - 1.0
signals = torch.randn(96, bodies, 3)
apart = signals[:, :, None] - signals[:, None]
force = charges[:, :, None] * charges[:, None] * apart / (apart.square().sum(-1, keepdim=True) + 0.5)
moved = signals + 0.1 * force.sum(2)

model = EGNN(in_node_nf=1, hidden_nf=16, out_node_nf=1, in_edge_nf=2, n_layers=2, attention=True, normalize=True)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=1e-12)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=options.dtype == "float16")


def predict(chosen):
    nodes, places = charges[chosen].reshape(-1, 1), signals[chosen].reshape(-1, 3)
    distance = (places[rows] - places[columns]).square().sum(1, keepdim=True)
    attributes = torch.cat([nodes[rows] * nodes[columns], distance], 1)
    return model(nodes, places, edges, attributes)[1]


losses, average = [], None
for _ in range(20):
    chosen = torch.randint(80, (batch_size,))
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
        places = predict(chosen)
        loss = functional.mse_loss(places.float(), moved[chosen].reshape(-1, 3))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
    average = loss.detach() if average is None else 0.9 * average + 0.1 * loss.detach()

with torch.no_grad():
    with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
        places = predict(torch.arange(80, 96))
    metrics = {"error": functional.mse_loss(places.float(), moved[80:].reshape(-1, 3)).item(), "loss": average.item()}
print(losses[0], losses[-1], metrics)
