"""Memory of asking for attention: one layer's class-token row against a plain forward, each in a process of its own.

python -m benchmarks.attention [--model vit-b/16] [--size 1024]
"""

from __future__ import annotations

import argparse
import subprocess
import sys

CODE = """
import resource, torch, vitkit
model = vitkit.create("{model}", image_size={size}).eval()
x = torch.randn(1, 3, {size}, {size})
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
with torch.inference_mode():
    model(torch.randn(1, 3, 64, 64))
    before = peak()
    {ask}
print(peak() - before)
"""
ASKS = {
    "plain forward": "model(x)",
    "class-token row of the last layer": "model.attention(x, layers=-1, query=0)",
    "class-token row of every layer": "model.attention(x, query=0)",
    "all of the last layer's attention": "model.attention(x, layers=-1)",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit-b/16")
    parser.add_argument("--size", type=int, default=1024)
    args = parser.parse_args()
    print(f"{args.model} at {args.size} px, one image; memory beyond the weights\n")
    print("| | MiB | of a plain forward |\n|---|---|---|")
    plain = None
    for name, ask in ASKS.items():
        code = CODE.format(model=args.model, size=args.size, ask=ask)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        mib = float(done.stdout)
        plain = plain or mib
        print(f"| {name} | {mib:.0f} | {mib / plain:.2f} |", flush=True)


if __name__ == "__main__":
    main()
