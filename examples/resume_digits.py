"""Trains the CNN of digits.py so that it may be killed at any moment: started again, it goes on where it was.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # without it torch 2.11 restarts no group over Gloo
    torchrun --standalone --nproc-per-node 2 --max-restarts 10 examples/resume_digits.py --folder runs/digits

Kill one of its processes, and it goes on by itself. Or kill all, and start it again, with another number of processes
if need be.
"""

import argparse

import torch
import torch.distributed as dist
from digits import TEST_COUNT, load_data, make_model
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import gradcast


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", required=True, help="for snapshots; all processes have to see it")
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images, targets = load_data()
    data = TensorDataset(images[:-TEST_COUNT], targets[:-TEST_COUNT])
    sampler = gradcast.ResumableSampler(data)
    loader = gradcast.ResumableLoader(DataLoader(data, batch_size=50, sampler=sampler, drop_last=True))

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    extra = {"scheduler": scheduler}
    step = gradcast.resume(args.folder, model, optimizer, loader=loader, extra=extra)
    if step is not None and dist.get_rank() == 0:
        print(f"goes on after step {step}, in epoch {sampler.epoch + 1}")
    handle = gradcast.attach(model, optimizer)
    handle.snapshots(args.folder, loader=loader, extra=extra)

    for epoch in range(sampler.epoch, args.epochs):
        model.train()
        for inputs, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(images[-TEST_COUNT:]).argmax(1) == targets[-TEST_COUNT:]).float().mean().item()
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1:2}: accuracy {accuracy:.2%}")
    handle.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
