"""The kind of device that a setting such as `launch.device` or `--device` selects. CUDA is not started."""

from collections.abc import Mapping

from dtrain.base.errors import UserError

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
DEVICE_TYPES = ("cpu", "cuda")


def choose_device_type(setting: str, wanted: str, environ: Mapping[str, str] | None = None) -> str:
    """Return "cpu" or "cuda".

    Args:
        setting: The setting's name, for messages, such as "launch.device".
        wanted: Its value. "auto" is "cuda" if torch sees a CUDA device.
        environ: The environment of the process that uses the device, to explain why it has none. None: not known.

    Raises:
        UserError: If `wanted` is unknown, or "cuda" without a CUDA device.

    Example:
        >>> choose_device_type("--device", "cpu")
        'cpu'
    """
    import torch  # measured: `import dtrain` is fast because only what computes loads torch

    if wanted not in ("auto", *DEVICE_TYPES):
        raise UserError(f"{setting}={wanted} is unknown. Use auto, cpu or cuda.")
    if wanted == "cpu":
        return "cpu"
    if torch.cuda.device_count() > 0:
        return "cuda"
    if wanted == "auto":
        return "cpu"
    reason = hidden_gpu_reason(environ or {})
    if reason is None:
        reason = "torch sees no CUDA device here (`nvidia-smi` shows what the driver sees)"
    raise UserError(f"{setting}=cuda: {reason}; or set {setting}=cpu")


def hidden_gpu_reason(environ: Mapping[str, str]) -> str | None:
    """Return the reason for a missing GPU that the build of torch or the environment shows. None if neither does."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA: install a build with it (https://pytorch.org)"
    if VISIBLE_DEVICES in environ:
        value = f"{VISIBLE_DEVICES}={environ[VISIBLE_DEVICES]}"
        return f"{value} hides all GPUs: unset it, or name some that `nvidia-smi -L` lists"
    return None
