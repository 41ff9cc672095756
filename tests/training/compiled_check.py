"""C++ of a test, compiled with sources of the part for torch. Takes half a minute."""

from pathlib import Path


def load_check(check, sources, folder):
    """The Python module of ``check``, a file beside this one. ``sources``: names in csrc/transport/torch. ``folder``:
    to build in."""
    from torch.utils import cpp_extension

    from gradcast.training.compat.extension import sources_root

    root = sources_root()
    return cpp_extension.load(
        name=Path(check).stem,
        sources=[
            str(Path(__file__).with_name(check)),
            *(str(root / "csrc/transport/torch" / s) for s in sources),
        ],
        extra_include_paths=[str(root / each) for each in ("csrc", "include")],
        extra_cflags=["-std=c++20", "-O1"],
        build_directory=str(folder),
    )
