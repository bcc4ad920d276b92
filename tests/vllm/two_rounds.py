"""Runs in a process of its own: documents twice through an engine; prints tokens, cached tokens and our metrics."""

import json
import random
import sys


def main():
    path, options = sys.argv[1], json.loads(sys.argv[2])
    from vllm import LLM, SamplingParams

    rng = random.Random(1)
    documents = [[rng.randrange(3, 500) for _ in range(290)] for _ in range(6)]
    defaults = {"dtype": "float32", "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 512}
    defaults |= {"enable_prefix_caching": True, "block_size": 32, "num_gpu_blocks_override": 24}
    engine = LLM(model=path, disable_log_stats=False, **defaults | options)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
    tokens, cached = [], []
    for document in documents * 2:
        output = engine.generate([{"prompt_token_ids": document}], params, use_tqdm=False)[0]
        tokens.append(list(output.outputs[0].token_ids))
        cached.append(output.num_cached_tokens)
    metrics = {metric.name: metric.value for metric in engine.get_metrics() if "kvtier" in metric.name}
    print("RESULT " + json.dumps({"tokens": tokens, "cached": cached, "metrics": metrics}))


if __name__ == "__main__":
    main()
