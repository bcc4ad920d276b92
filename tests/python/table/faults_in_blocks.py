"""Faults in who gets which block, what is published, stored, evicted and counted."""

from __future__ import annotations

from random import Random

from faults import Fault, around, collected_in
from kvtier.reference import hashing
from kvtier.reference.blocks import Blocks
from kvtier.reference.tier import State, Tier

FAULTS: dict[str, Fault] = {}
fault = collected_in(FAULTS)


@fault
def held_blocks_are_evicted(patch):
    @around(patch, Tier, "hold")
    def stay_evictable(original, self, block_id):
        evictable = block_id in self.eviction_order
        original(self, block_id)
        if evictable:
            self.eviction_order[block_id] = None


@fault
def two_stores_go_to_one_slot(patch):
    @around(patch, Tier, "allocate")
    def twice(original, self, count, state):
        block_ids = original(self, count, state)
        if state is State.IN_FLIGHT and count > 1:
            self.make_free(block_ids.pop())
            block_ids.append(block_ids[0])
        return block_ids


@fault
def host_ids_continue_those_of_the_gpu(patch):
    @around(patch, Blocks, "step")
    def shift(original, self):
        step = original(self)
        for store in step.stores:
            object.__setattr__(store, "destination", store.destination + len(self.gpu.slots))
        return step

    @around(patch, Blocks, "_finish_stores")
    def shift_back(original, self, stores, failed):
        for store in stores:
            object.__setattr__(store, "destination", store.destination - len(self.gpu.slots))
        original(self, stores, failed)


@fault
def a_refused_request_keeps_its_hits(patch):
    @around(patch, Blocks, "_require")
    def hold_first(original, self, needed, available):
        if needed > available:
            for block_id in list(self.gpu.eviction_order)[:1]:
                self.gpu.hold(block_id)
        original(self, needed, available)


@fault
def gpu_hits_pin_their_host_copies(patch):
    @around(patch, Blocks, "admit")
    def pin(original, self, request_id, num_tokens, chain, hashes):
        request = original(self, request_id, num_tokens, chain, hashes)
        for block_hash in hashes[: request.gpu_hits]:
            if block_hash in self.cpu.index:
                self.cpu.hold(self.cpu.index[block_hash])
        return request


@fault
def an_aborted_request_leaks_its_last_block(patch):
    @around(patch, Blocks, "end")
    def leak(original, self, request):
        if len(request.block_ids) * self.block_size > request.num_tokens:
            request.block_ids = request.block_ids[:-1]
        original(self, request)


@fault
def a_failed_store_leaks_its_slot(patch):
    @around(patch, Blocks, "_finish_stores")
    def leak(original, self, stores, failed):
        original(self, stores, failed)
        for index in failed:
            self.cpu.free.remove(stores[index].destination)
            self.cpu.assign(stores[index].destination, State.CLAIMED)


@fault
def a_failed_store_is_not_offered_again(patch):
    @around(patch, Blocks, "_finish_stores")
    def forget(original, self, stores, failed):
        original(self, stores, failed)
        for index in failed:
            self.store_queue.pop(stores[index].source, None)


@fault
def a_block_that_fills_while_commits_lag_is_never_stored(patch):
    @around(patch, Blocks, "_publish_gpu")
    def skip(original, self, block_id, block_hash, holds):
        original(self, block_id, block_hash, holds)
        if len(self.store_queue) > 1:
            self.store_queue.popitem()


@fault
def every_sharer_stores_its_own_copy(patch):
    @around(patch, Blocks, "commit")
    def store_again(original, self, request, num_tokens):
        original(self, request, num_tokens)
        for position in range(request.gpu_hits, num_tokens // self.block_size):
            self.store_queue.setdefault(self.gpu.index.get(request.hashes[position], 0))


@fault
def a_prompt_may_hit_to_its_last_token(patch):
    around(patch, Blocks, "usable")(lambda original, self, hashes, num_tokens: original(self, hashes, num_tokens + 1))


@fault
def a_block_is_published_one_token_early(patch):
    @around(patch, Blocks, "commit")
    def early(original, self, request, num_tokens):
        original(self, request, min(num_tokens + 1, request.num_tokens))


@fault
def an_ended_request_publishes_what_it_did_not_commit(patch):
    @around(patch, Blocks, "end")
    def publish(original, self, request):
        if request.ready:
            self.commit(request, request.num_tokens)
        original(self, request)


@fault
def the_head_of_a_chain_is_given_up_first(patch):
    @around(patch, Blocks, "end")
    def head_first(original, self, request):
        original(self, request)
        for block_hash in request.hashes:
            if block_hash in self.gpu.index:
                self.gpu.refresh(self.gpu.index[block_hash])
            if block_hash in self.cpu.index:
                self.cpu.refresh(self.cpu.index[block_hash])


@fault
def cancelled_loads_are_started_all_the_same(patch):
    @around(patch, Blocks, "end")
    def keep(original, self, request):
        planned = list(self.planned_loads)
        original(self, request)
        self.planned_loads = planned


@fault
def a_step_stores_more_than_its_budget(patch):
    @around(patch, Blocks, "_plan_stores")
    def unbounded(original, self):
        self.max_store_blocks += 1
        return original(self)


@fault
def a_full_host_tier_is_an_error(patch):
    @around(patch, Blocks, "_plan_stores")
    def fail(original, self):
        assert len(self.store_queue) <= self.cpu.num_available, "store queue too long"
        return original(self)


@fault
def reset_forgets_the_host_tier(patch):
    @around(patch, Tier, "clear")
    def gpu_only(original, self):
        if self.name == "gpu":
            original(self)


@fault
def reset_does_not_mind_live_requests(patch):
    patch.setattr(Blocks, "clear", lambda self: True)


@fault
def a_counter_goes_down(patch):
    around(patch, Blocks, "end")(
        lambda original, self, request: (original(self, request), self.journal.count("gpu_hit_blocks", -1))
    )


@fault
def the_salt_is_no_part_of_the_key(patch):
    request_root = hashing.request_root
    patch.setattr(hashing, "request_root", lambda root, salt, adapter: request_root(root, None, adapter))


@fault
def salt_and_adapter_run_together(patch):
    patch.setattr(hashing, "field", lambda tag, value: str(value).encode())


@fault
def same_calls_give_other_ids(patch):
    @around(patch, Tier, "allocate")
    def shuffle(original, self, count, state):
        block_ids = original(self, count, state)
        Random(id(self)).shuffle(block_ids)
        return block_ids
