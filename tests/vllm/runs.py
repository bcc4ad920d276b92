"""What the engine tests share: documents, and engines that are run to the end."""

import random

from kv_bytes import compare_kv


def documents(count, num_tokens, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(3, 500) for _ in range(num_tokens)] for _ in range(count)]


def generate(engine, prompts, max_tokens=4):
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def one_by_one(engine, prompts, known=None):
    tokens = []
    for prompt in prompts:
        tokens += generate(engine, [prompt])
        if known is not None:
            compare_kv(engine, known)
    return tokens


def settle(engine):
    """Let the engine take the acknowledgements of the last copies."""
    core = engine.llm_engine.engine_core.engine_core
    for _ in range(200):
        if not core.scheduler.connector.has_pending_push_work():
            return
        core.step_fn()
    raise AssertionError("copies have not ended in 200 steps")


def step_through(engine, prompts, max_tokens, aborts=None):
    """Run requests together, step by step; `aborts` is {index of the prompt: step at which it is aborted}.

    Returns the tokens of each request, those of aborted ones as far as they were told.
    """
    from vllm import SamplingParams

    llm = engine.llm_engine
    aborts = aborts or {}
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    tokens = {}
    # vLLM adds to the ids that it is given, and takes either for an abort.
    names = [f"step-{index}" for index in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        llm.add_request(name, {"prompt_token_ids": prompt}, params)
    step = 0
    while llm.has_unfinished_requests():
        now = [names[index] for index, at in aborts.items() if at == step]
        if now:
            llm.abort_request(now)
        for output in llm.step():
            tokens[output.request_id] = tuple(output.outputs[0].token_ids)
        step += 1
        assert step < 5000, "the engine does not come to an end"
    assert set(tokens) <= set(names), "a request has another name"
    for index, name in enumerate(names):
        assert index in aborts or len(tokens[name]) == max_tokens
    return [tokens.get(name, ()) for name in names]
