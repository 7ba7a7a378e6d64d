"""Trains a radiance field on rays through a colored ball, with the repository's network, encoding and renderer."""

import argparse
import sys
import types

import torch

for name in (
    "imageio",
    "matplotlib",
    "matplotlib.pyplot",
    "cv2",
    "load_llff",
    "load_deepvoxels",
    "load_blender",
    "load_LINEMOD",
):
    stub = types.ModuleType(name)
    stub.pyplot = stub.load_llff_data = stub.load_dv_data = stub.load_blender_data = stub.load_LINEMOD_data = stub
    sys.modules.setdefault(name, stub)

from run_nerf import raw2outputs, run_network  # noqa: E402 - after the stubs
from run_nerf_helpers import NeRF, get_embedder, img2mse, mse2psnr  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="float16")
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()
dtype = getattr(torch, options.dtype)
torch.manual_seed(options.seed)

embed, width = get_embedder(4)
embed_views, views_width = get_embedder(2)
model = NeRF(D=3, W=32, input_ch=width, input_ch_views=views_width, skips=[1], use_viewdirs=True)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=options.dtype == "float16")

origins = torch.tensor([0.0, 0.0, -3.0]).expand(128, 3)
directions = torch.nn.functional.normalize(torch.randn(128, 3) * 0.25 + torch.tensor([0.0, 0.0, 1.0]), dim=-1)
inside = (directions[:, :2].norm(dim=-1) < 0.3).float()
colors = inside[:, None] * torch.tensor([0.9, 0.4, 0.1])


def render(chosen):
    depths = torch.linspace(2.0, 4.0, 16).expand(len(chosen), 16)
    points = origins[chosen][:, None] + directions[chosen][:, None] * depths[..., None]
    raw = run_network(points, directions[chosen], model, embed, embed_views)
    return raw2outputs(raw, depths, directions[chosen])


losses = []
for _ in range(25):
    chosen = torch.randint(128, (48,))
    with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
        rgb, disparity, opacity, weights, depth = render(chosen)
        loss = img2mse(rgb, colors[chosen])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())

with torch.no_grad():
    with torch.autocast("cpu", dtype=dtype, enabled=options.dtype != "float32"):
        rgb, disparity, opacity, weights, depth = render(torch.arange(128))
    metrics = {"psnr": mse2psnr(img2mse(rgb, colors)).item(), "depth": depth.mean().item()}
print(losses[0], losses[-1], metrics)
