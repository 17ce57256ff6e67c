"""How the kernels of triton_training.py are launched.

That is: warps, rows at a time (STEP), rows and columns of a program (ROWS, BLOCK), turns of its loop that load ahead
(STAGES), programs per multiprocessor (per).
"""

LAUNCH: dict[str, dict[str, int]] = {
    "norm_forward": {"num_warps": 1},
    "norm_backward": {"num_warps": 1, "STAGES": 3, "per": 8},
    "gelu_forward": {"num_warps": 4, "STEP": 4, "BLOCK": 1024},
    "gelu_backward": {"num_warps": 4, "STEP": 8, "ROWS": 128, "BLOCK": 256, "STAGES": 3},
    "columns_to_fp8": {"num_warps": 4, "STEP": 128, "BLOCK": 16},
    "attention_backward": {"num_warps": 8, "STEP": 64, "STAGES": 3},
    "first_forward": {"num_warps": 1, "STEP": 16},
    "first_backward": {"num_warps": 1, "STEP": 16},
    "side_by_side": {"num_warps": 4, "STEP": 8, "ROWS": 256, "BLOCK": 256, "STAGES": 1},
}
