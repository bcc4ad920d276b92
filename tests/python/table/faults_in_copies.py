"""Faults in what happens between the planning of a copy and its end."""

from __future__ import annotations

from faults import Fault, around, collected_in
from kvtier.reference.blocks import Blocks
from kvtier.reference.tier import Tier

FAULTS: dict[str, Fault] = {}
fault = collected_in(FAULTS)


@fault
def store_is_a_hit_before_it_is_acknowledged(patch):
    @around(patch, Blocks, "_plan_stores")
    def publish_at_once(original, self):
        stores, not_stored = original(self)
        for store in stores:
            self.cpu.publish(store.destination, store.block_hash, holds=1)
        return stores, not_stored

    @around(patch, Blocks, "_finish_stores")
    def only_drop(original, self, stores, failed):
        for store in stores:
            self.receiving.discard(store.block_hash)
            self.cpu.drop(store.destination)
            self.gpu.drop(store.source)


@fault
def load_is_a_hit_before_it_is_acknowledged(patch):
    @around(patch, Blocks, "step")
    def publish_at_once(original, self):
        step = original(self)
        for load in step.loads:
            if load.block_hash not in self.gpu.index:
                self.gpu.publish(load.destination, load.block_hash, holds=1)
        return step


@fault
def blocks_are_hits_before_they_are_committed(patch):
    @around(patch, Blocks, "admit")
    def publish_at_once(original, self, request_id, num_tokens, chain, hashes):
        request = original(self, request_id, num_tokens, chain, hashes)
        if request.ready:
            for position in range(request.gpu_hits, len(hashes)):
                if hashes[position] not in self.gpu.index:
                    self._publish_gpu(request.block_ids[position], hashes[position], holds=1)
        return request


@fault
def ticket_does_not_hold_what_it_stores(patch):
    @around(patch, Blocks, "_plan_stores")
    def forget(original, self):
        stores, not_stored = original(self)
        for store in stores:
            self.gpu.drop(store.source)
        return stores, not_stored

    @around(patch, Blocks, "_finish_stores")
    def without_source(original, self, stores, failed):
        for store in stores:
            self.gpu.hold(store.source)
        original(self, stores, failed)


@fault
def load_does_not_hold_what_it_loads(patch):
    @around(patch, Blocks, "admit")
    def forget(original, self, *args):
        request = original(self, *args)
        for load in self.planned_loads:
            if load.request is request:
                self.cpu.drop(load.source)
        return request

    @around(patch, Blocks, "_finish_loads")
    def without_source(original, self, loads, failed):
        for load in loads:
            self.cpu.hold(load.source)
        original(self, loads, failed)


@fault
def a_request_that_ends_takes_its_running_loads_along(patch):
    @around(patch, Blocks, "end")
    def free_at_once(original, self, request):
        landing = [load.destination for t in self.tickets.values() for load in t.loads if load.request is request]
        original(self, request)
        for block_id in landing:
            self.gpu.make_free(block_id)

    @around(patch, Blocks, "_land")
    def only_for_the_living(original, self, load, is_good):
        return load.request.live and original(self, load, is_good)


@fault
def acknowledgements_belong_to_whoever_has_the_request_id_now(patch):
    @around(patch, Blocks, "_finish_loads")
    def by_name(original, self, loads, failed):
        original(self, loads, failed)
        for load in loads:
            namesake = self.requests.get(load.request.request_id)
            if namesake is not None:
                namesake.ready = True


@fault
def failed_stores_are_published(patch):
    around(patch, Blocks, "_finish_stores")(lambda original, self, stores, failed: original(self, stores, set()))


@fault
def failed_loads_are_published(patch):
    around(patch, Blocks, "_finish_loads")(lambda original, self, loads, failed: original(self, loads, set()))


@fault
def a_copy_that_failed_to_load_stays_a_hit(patch):
    patch.setattr(Tier, "withdraw", lambda self, block_id: None)


@fault
def what_was_loaded_behind_a_failure_is_published(patch):
    @around(patch, Blocks, "_finish_loads")
    def each_for_itself(original, self, loads, failed):
        self.failed_loads = {id(loads[index]) for index in failed}
        original(self, loads, failed)

    @around(patch, Blocks, "_land")
    def published(original, self, load, is_good):
        return original(self, load, id(load) not in self.failed_loads)


@fault
def a_commit_does_not_wait_for_loads(patch):
    @around(patch, Blocks, "commit")
    def at_once(original, self, request, num_tokens):
        ready, request.ready = request.ready, True
        original(self, request, num_tokens)
        request.ready = ready


@fault
def a_remembered_commit_outlives_a_failed_load(patch):
    @around(patch, Blocks, "_finish_request_loads")
    def commit_anyway(original, self, request, first_failed):
        remembered = request.remembered_commit
        original(self, request, first_failed)
        self.commit(request, remembered)


@fault
def the_first_rank_finishes_the_ticket(patch):
    @around(patch, Blocks, "acknowledge")
    def at_once(original, self, number, rank, failed):
        self.tickets[number].waiting_ranks = {rank}
        return original(self, number, rank, failed)


@fault
def failures_of_earlier_ranks_are_forgotten(patch):
    @around(patch, Blocks, "acknowledge")
    def overwrite(original, self, number, rank, failed):
        self.tickets[number].failed = set()
        return original(self, number, rank, failed)
