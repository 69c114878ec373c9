"""Which server of a fleet holds which models: by bytes, each model on as many servers as it has replicas."""
import pathlib


def model_bytes(repository, name):
    """Bytes of a model's weights on disk, which is about what they take on a device."""
    files = [path for path in pathlib.Path(repository, name).rglob("*") if path.suffix in (".safetensors", ".gguf")]
    if not files:
        raise ValueError(f"models.{name}: got no .safetensors or .gguf file in {repository}/{name}")
    return sum(path.stat().st_size for path in files)


def place(models, servers):
    """{name: (bytes, replicas)} -> for each server the names of its models.

    The largest first, each to the servers that have least: no server ends with more than the mean and one model.
    """
    for name, (_, replicas) in models.items():
        if not 1 <= replicas <= servers:
            raise ValueError(f"models.{name}.replicas: got {replicas}, expected 1 to {servers}, the number of servers")
    held = [0] * servers
    placed = [[] for _ in range(servers)]
    for name, (size, replicas) in sorted(models.items(), key=lambda item: (-item[1][0], item[0])):
        for server in sorted(range(servers), key=lambda index: (held[index], index))[:replicas]:
            held[server] += size
            placed[server].append(name)
    empty = [index for index, names in enumerate(placed) if not names]
    if empty:
        raise ValueError(f"servers: got {servers}, expected at most {servers - len(empty)}: the others would hold nothing")
    return placed
