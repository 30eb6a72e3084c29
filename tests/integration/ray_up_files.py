"""The files of test_ray_up: those we ship, with the addresses and sizes of the hosts that the test makes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import yaml

from cluster.tokenizer import Tokenizer
from tests.checkpoints import load_reference, make_checkpoint
from tests.integration.hosts import Lab
from tests.unit.tiny_tokenizers import byte_level

ROOT = Path(__file__).parents[2]
HEAD = """--num-cpus=0 --resources='{"front": 1}'"""
WORKER = "--num-cpus=2"
TINY_TOKENS = 16
COMMON = "--object-store-memory=100000000 --disable-usage-stats"


def cluster_file(lab: Lab, path: Path) -> None:
    """clusters/on-premise.yaml for the hosts of `lab`: the first is the head and has no CPU for ranks, the others two
    each. They have no network to install from: their virtual environment is ours."""
    config = yaml.safe_load((ROOT / "ray_configs/clusters/on-premise.yaml").read_text())
    head, *workers = (host.address for host in lab.hosts.values())
    config["provider"] |= {"head_ip": head, "worker_ips": workers}
    config["auth"] = {"ssh_user": "root", "ssh_private_key": str(lab.key)}
    config["metadata"]["raydix"]["host_resources"] = {"CPU": 2}
    config["setup_commands"] = [
        f"ln -sfn {sys.prefix} ~/raydix-venv",
        *(command for command in config["setup_commands"] if "bashrc" in command),
        "grep -q PYTHONPATH ~/.bashrc || echo 'export PYTHONPATH=\"$HOME/raydix\"' >> ~/.bashrc",
    ]
    for key, sizes in (("head_start_ray_commands", HEAD), ("worker_start_ray_commands", WORKER)):
        config[key] = [command.replace("ray start", f"ray start {sizes} {COMMON}") for command in config[key]]
    path.write_text(yaml.safe_dump(config))


def tiny_model(directory: Path) -> Path:
    """A checkpoint that two ranks can share, as the real one's 9 heads cannot be; `tiny.txt` beside it is what
    transformers makes of "once"."""
    path = directory / "tiny"
    path.mkdir()
    tokenizer = Tokenizer(byte_level(path))
    make_checkpoint("qwen3", path, vocab_size=tokenizer.vocab_size)
    prompt = torch.tensor([tokenizer.encode("once")])
    model = load_reference(path)
    ids = model.generate(prompt, max_new_tokens=TINY_TOKENS, do_sample=False, eos_token_id=None)[0].tolist()
    (directory / "tiny.txt").write_text(tokenizer.decode(ids)[len(tokenizer.decode(prompt[0].tolist())) :])
    return path


def serve_file(path: Path, model: Path, tp_size: int, replicas: int, max_seq_len: int = 1024) -> None:
    """serve/replicas.yaml on CPUs. Drivers and the ingress run on the head, whose cable nobody pulls."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "ray_configs/serve/replicas.yaml").read_text())
    (application,) = config["applications"]
    application["args"] |= {
        "model": str(model),
        "served_model_name": "SmolLM2",
        "tp_size": tp_size,
        "device": "cpu",
        "max_running_requests": 8,
        "max_seq_len": max_seq_len,
        "num_pages": 256,
        "step_timeout": 20,
        "placement_timeout": 120,
    }
    front = {"num_cpus": 0, "resources": {"front": 0.01}}
    application["deployments"] = [
        {"name": "engine", "num_replicas": replicas, "ray_actor_options": front, "graceful_shutdown_timeout_s": 5},
        {"name": "ingress", "num_replicas": 1, "ray_actor_options": front},
    ]
    path.write_text(yaml.safe_dump(config))
