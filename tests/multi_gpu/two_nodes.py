"""Run by test_groups: two Ray nodes (two raylets on this machine) with one card each, and a group of two over both."""

from __future__ import annotations

import tempfile

import ray
import torch
from ray.cluster_utils import Cluster

from cluster import LLM, SamplingParams, spare_ranks
from tests.checkpoints import load_reference, make_checkpoint
from tests.references import first_wrong_greedy_token

PROMPTS = [[5, 6, 7], list(range(3, 60)), [9] * 17]


def main() -> None:
    spare_ranks.DELAY = 3600.0
    cluster = Cluster()
    for card in ("0", "1"):
        dashboard = {} if cluster.head_node else {"include_dashboard": False}
        env = {"CUDA_VISIBLE_DEVICES": card}
        cluster.add_node(num_cpus=2, num_gpus=1, object_store_memory=100 << 20, env_vars=env, **dashboard)
    ray.init(address=cluster.address, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        path = make_checkpoint("llama", folder)
        with LLM(
            str(path), tp_size=2, device="cuda", dtype="float32", max_seq_len=128, num_pages=128,
            max_running_requests=8, gpu_memory_utilization=0.5,
        ) as llm:  # fmt: skip
            assert len({rank.node_id for rank in llm.info.ranks}) == 2, llm.info.ranks
            print([(rank.node_id[:6], rank.gpu_ids) for rank in llm.info.ranks])
            greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
            outputs = llm.generate(PROMPTS, greedy, progress=False)
        reference = load_reference(path)
        with torch.inference_mode():
            for output in outputs:
                assert first_wrong_greedy_token(reference, output.prompt_token_ids, output.token_ids, 1e-4) is None
    ray.shutdown()
    cluster.shutdown()
    print("done")


if __name__ == "__main__":
    main()
