"""Six gradients are broken: say which line of each is wrong.

`LINES` is the backward pass of one head, in the order in which it is computed. Each of the six patients A to F ran it
with one line changed, on two queries and four keys with head_dim 2. What came out stands in `PATIENTS`, rounded to
three decimals; `RIGHT` is what should have come out. No forward pass was wrong: o and lse are right.

For each patient write in `DIAGNOSIS` the changed line, as the patient ran it: its name, and the wrong expression.
Some patients have two diagnoses that give the same numbers; either will do.
`report()` runs your lines and prints what they give beside the patient's numbers:

    python work/phase4_backward/broken_gradient.py

First ask which of dq, dk and dv are wrong, and which lines all the wrong ones share. Then look at the numbers: is one
of them a multiple of the right one? Does each row add up to something?

Notebook: phase4_backward/backward.ipynb, section 5.2, "Which gradients does each mistake spoil?".
"""

import torch

q = torch.tensor([[2.0, 0.0], [1.0, -1.0]], dtype=torch.float64)
k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
v = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 1.0], [-1.0, 1.0]], dtype=torch.float64)
do = torch.tensor([[1.0, -1.0], [0.5, 2.0]], dtype=torch.float64)
scale = 2**-0.5
lse = torch.logsumexp(scale * q @ k.T, dim=1)
o = torch.softmax(scale * q @ k.T, dim=1) @ v

LINES = {
    "delta": "(do * o).sum(dim=1)",
    "s": "scale * q @ k.T",
    "p": "torch.exp(s - lse[:, None])",
    "dp": "do @ v.T",
    "ds": "p * (dp - delta[:, None])",
    "dv": "p.T @ do",
    "dk": "scale * ds.T @ q",
    "dq": "scale * ds @ k",
}

RIGHT = {
    "dq": [[0.011, -0.537], [-0.552, 0.205]],
    "dk": [[0.605, 0.374], [0.003, -0.213], [0.264, -0.170], [-0.872, 0.008]],
    "dv": [[0.687, 0.576], [0.167, 0.140], [0.087, 0.220], [0.559, 0.064]],
}

PATIENTS = {
    "A": RIGHT | {"dk": [[0.428, 0.265], [0.002, -0.151], [0.187, -0.120], [-0.617, 0.006]]},
    "B": RIGHT | {
        "dq": [[-0.343, -0.764], [0.139, 0.612]],
        "dk": [[0.793, -0.179], [0.049, -0.347], [0.377, -0.304], [-0.964, -0.264]],
    },
    "C": {
        "dq": [[0.025, -1.266], [-0.234, 0.087]],
        "dk": [[2.152, 0.159], [-0.405, -0.090], [0.294, -0.072], [-2.041, 0.004]],
        "dv": [[1.132, -0.596], [0.275, -0.145], [0.087, 0.044], [1.077, -0.813]],
    },
    "D": RIGHT | {"dv": [[0.428, -1.751], [0.002, 0.751], [0.187, 0.413], [-0.617, 0.587]]},
    "E": RIGHT | {
        "dq": [[0.077, 0.077], [-0.955, -1.577]],
        "dk": [[0.539, 0.916], [-0.205, 0.747], [0.123, 0.790], [-1.218, 0.830]],
    },
    "F": RIGHT | {"dq": [[-0.479, -0.432], [-0.178, -0.008]]},
}

DIAGNOSIS = {
    # your code: for each patient the name of one line, and what stood there
    #| "A": {},  # for example {"delta": "-(do * o).sum(dim=1)"}
    #| "B": {},
    #| "C": {},
    #| "D": {},
    #| "E": {},
    #| "F": {},
    "A": {"dk": "scale**2 * ds.T @ q"},
    "B": {"delta": "0 * lse"},
    "C": {"p": "torch.exp(s - lse.flip(0)[:, None])"},
    "D": {"dv": "ds.T @ do"},
    "E": {"ds": "p * dp - delta[:, None]"},
    "F": {"dq": "scale * ds[:, 2:] @ k[2:]"},
    # end of your code
}


def gradients(changed: dict[str, str]) -> dict[str, torch.Tensor]:
    """dq, dk and dv by `LINES`, with some of them changed."""
    names = dict(torch=torch, q=q, k=k, v=v, do=do, scale=scale, lse=lse, o=o)
    for name, line in (LINES | changed).items():
        names[name] = eval(line, names)
    return {name: names[name] for name in ("dq", "dk", "dv")}


def report() -> None:
    """What each diagnosis gives, beside the patient."""
    for patient, changed in DIAGNOSIS.items():
        print(f"{patient}  {changed or 'no diagnosis: the right lines'}")
        for name, yours in gradients(changed).items():
            theirs = torch.tensor(PATIENTS[patient][name], dtype=torch.float64)
            agree = "agrees" if torch.allclose(yours, theirs, atol=2e-3) else "differs"
            print(f"   {name} {agree:<8} yours {[[round(x, 3) for x in row] for row in yours.tolist()]}")
            print(f"      {'':<8} theirs {PATIENTS[patient][name]}")


if __name__ == "__main__":
    report()
