"""The scheduler's side of the vLLM connector, driven as vLLM drives it; without vLLM."""

import itertools
from types import SimpleNamespace

import pytest
from kvtier.connectors.vllm.metadata import Acknowledgements
from kvtier.connectors.vllm.options import Options
from kvtier.connectors.vllm.scheduler import SchedulerSide
from kvtier.errors import ConfigError

BLOCK_SIZE = 4
BLOCK_BYTES = 4096


class Block:
    def __init__(self, block_id):
        self.block_id = block_id
        self.block_hash = None
        self.ref_cnt = 0
        self.is_null = block_id == 0
        self.prev_free_block = self.next_free_block = None


class Queue:
    """vLLM's free queue: linked, with an end that is no block."""

    def __init__(self, blocks):
        self.fake_free_list_head = Block(-1)
        self.order = list(blocks)
        self.link()

    def link(self):
        chain = [self.fake_free_list_head, *self.order, Block(-2)]
        for block, following in itertools.pairwise(chain):
            block.next_free_block = following
        chain[-1].next_free_block = None

    def remove(self, block):
        self.order.remove(block)
        self.link()

    def prepend_n(self, blocks):
        self.order[:0] = blocks
        self.link()


class Pool:
    """What the connector uses of vLLM's block pool."""

    def __init__(self, num_blocks):
        self.num_gpu_blocks = num_blocks
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.free_block_queue = Queue(self.blocks[1:])
        self.evicted = set()

    def touch(self, blocks):
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, blocks):
        for block in blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0
            if block.ref_cnt == 0:
                self.free_block_queue.order.append(block)
        self.free_block_queue.link()

    def evict_blocks(self, block_ids):
        self.evicted |= block_ids

    @property
    def held(self):
        return {block.block_id for block in self.blocks if block.ref_cnt}


def hashes(name, count):
    return [f"{name}-{index}".encode().ljust(32, b".") for index in range(count)]


class Drive:
    """vLLM's scheduler, as far as the connector sees it."""

    def __init__(self, num_cpu_blocks=16, ranks=1, num_gpu_blocks=64, **options):
        self.options = Options(host_gib=1, **{"load_choice": "always", "same_step_loads": False} | options)
        self.side = SchedulerSide(self.options, BLOCK_SIZE, num_cpu_blocks, ranks, BLOCK_BYTES)
        self.pool = Pool(num_gpu_blocks)
        self.side.bind(self.pool)
        self.ranks = ranks
        self.requests = {}
        self.gpu_ids = {}

    def add(self, name, content=None, num_blocks=3, first_gpu_id=1):
        """A request of `num_blocks` full blocks and a token."""
        request = SimpleNamespace(
            request_id=name,
            num_tokens=num_blocks * BLOCK_SIZE + 1,
            num_computed_tokens=0,
            block_hashes=hashes(content or name, num_blocks),
            skip_reading_prefix_cache=False,
            lora_request=None,
        )
        self.requests[name] = request
        self.gpu_ids[name] = list(range(first_gpu_id, first_gpu_id + num_blocks + 1))
        self.side.add(request)
        return request

    def find(self, name, num_computed_tokens=0):
        return self.side.find(self.requests[name], num_computed_tokens)

    def allocate(self, name, num_tokens):
        blocks = SimpleNamespace(get_block_ids=lambda: (self.gpu_ids[name],))
        self.side.plan_load(self.requests[name], blocks, num_tokens)

    def step(self, **num_tokens):
        state = SimpleNamespace(get_block_ids=lambda name: (self.gpu_ids[name],))
        output = SimpleNamespace(
            total_num_scheduled_tokens=sum(num_tokens.values()),
            num_scheduled_tokens=num_tokens,
            kv_connector_block_state=state,
        )
        plan = self.side.plan_step(output)
        for name, count in num_tokens.items():
            self.requests[name].num_computed_tokens += count
        return plan

    def end(self, ticket, failed=(), rank=None, dead=False):
        for each in range(self.ranks) if rank is None else [rank]:
            finished = [(ticket, each, list(failed))]
            self.side.take(Acknowledgements(self.side._step, finished, [each] if dead else []))

    def store(self, name, **request):
        """Compute a request, store its blocks, and let it go."""
        self.add(name, **request)
        assert self.find(name)[0] == 0
        self.allocate(name, 0)
        plan = self.step(**{name: self.requests[name].num_tokens})
        if plan.store_ticket is not None:
            self.end(plan.store_ticket)
        self.side.drop(name)
        return plan

    def stat(self, name):
        return self.side.stats()[name]


def test_stored_blocks_are_found_and_loaded():
    drive = Drive()
    plan = drive.store("a")
    assert plan.stores[:, 0].tolist() == [1, 2, 3]
    drive.add("b", "a", first_gpu_id=20)
    assert drive.find("b") == (12, True)
    drive.allocate("b", 12)
    plan = drive.step()
    (load,) = plan.loads
    assert load.request_id == "b"
    assert load.pairs[:, 1].tolist() == [20, 21, 22]
    assert drive.side.has_open_tickets
    drive.end(load.ticket)
    assert not drive.side.has_open_tickets
    assert [drive.stat(name) for name in ("prompt_tokens", "host_hit_tokens", "loaded_blocks")] == [26, 12, 3]
    drive.side.table.audit()


def test_a_token_is_left_to_compute():
    drive = Drive()
    drive.store("a")
    request = drive.add("b", "a")
    request.num_tokens = 12
    assert drive.find("b") == (8, True)


def test_only_what_follows_the_computed_tokens_is_loaded():
    drive = Drive()
    drive.store("a")
    drive.add("b", "a", first_gpu_id=20)
    assert drive.find("b", 4) == (8, True)
    drive.allocate("b", 8)
    assert drive.step().loads[0].pairs[:, 1].tolist() == [21, 22]
    drive.add("c", "a")
    assert drive.find("c", 6) == (0, False)  # within a block


def test_a_request_that_does_not_read_the_cache_loads_nothing():
    drive = Drive()
    drive.store("a")
    drive.add("b", "a").skip_reading_prefix_cache = True
    assert drive.find("b") == (0, False)
    assert drive.side.find(SimpleNamespace(request_id="unknown"), 0) == (0, False)


def test_sources_are_held_until_every_rank_has_copied():
    drive = Drive(ranks=2)
    drive.add("a")
    plan = drive.step(a=13)
    assert drive.pool.held == {1, 2, 3}
    drive.side.drop("a")
    drive.end(plan.store_ticket, rank=0)
    drive.add("b", "a")
    assert drive.pool.held == {1, 2, 3}
    assert drive.find("b") == (0, False)
    assert drive.side.has_open_stores
    drive.end(plan.store_ticket, rank=1)
    assert drive.pool.held == set()
    assert drive.find("b") == (12, True)
    # The tail is reused first.
    assert [block.block_id for block in drive.pool.free_block_queue.order[-3:]] == [3, 2, 1]


def test_a_rank_that_failed_makes_a_miss():
    drive = Drive(ranks=2)
    drive.add("a")
    ticket = drive.step(a=13).store_ticket
    drive.end(ticket, rank=0)
    drive.end(ticket, failed=[1], rank=1)
    assert drive.pool.held == set()
    drive.add("b", "a")
    assert drive.find("b") == (4, True)


def test_only_blocks_that_the_step_fills_are_stored():
    drive = Drive()
    drive.add("a")
    assert drive.step(a=3).store_ticket is None
    assert drive.step(a=2).stores[:, 0].tolist() == [1]
    assert drive.step(a=7).stores[:, 0].tolist() == [2, 3]
    assert drive.step(a=1).store_ticket is None


def test_a_prefix_that_is_being_loaded_is_joined():
    drive = Drive()
    drive.store("a")
    drive.store("z", first_gpu_id=10)
    drive.add("b", "a", first_gpu_id=20)
    drive.allocate("b", drive.find("b")[0])
    drive.add("c", "a", first_gpu_id=30)
    drive.add("d", "z", first_gpu_id=40)
    assert drive.find("c") == (None, False)
    assert drive.find("c") == (None, False)
    assert drive.find("d") == (12, True)  # does not need it
    assert drive.stat("num_joined") == 1
    drive.end(drive.step().loads[0].ticket)
    assert drive.find("c", 12) == (0, False)


def test_a_budget_of_loads():
    drive = Drive(max_load_bytes_per_step=4 * BLOCK_BYTES)
    drive.store("a")
    drive.store("b", first_gpu_id=10)
    for name, content in (("c", "a"), ("d", "b")):
        drive.add(name, content, first_gpu_id=20)
    drive.allocate("c", drive.find("c")[0])
    assert drive.find("d") == (None, False)
    assert drive.stat("num_deferred") == 1
    drive.step()
    assert drive.find("d") == (12, True)


def test_a_single_load_above_the_budget_is_made():
    drive = Drive(max_load_bytes_per_step=BLOCK_BYTES)
    drive.store("a")
    drive.add("b", "a", first_gpu_id=20)
    assert drive.find("b") == (12, True)


def test_a_budget_of_stores():
    drive = Drive(max_store_bytes_per_step=2 * BLOCK_BYTES)
    drive.add("a")
    assert drive.step(a=12).stores[:, 0].tolist() == [1, 2]
    assert drive.step(a=1).stores[:, 0].tolist() == [3]
    assert drive.stat("over_budget_blocks") == 1


@pytest.mark.parametrize("name", ["max_store_bytes_per_step", "max_load_bytes_per_step"])
def test_a_budget_below_a_block_is_refused(name):
    with pytest.raises(ConfigError, match=name):
        Drive(**{name: BLOCK_BYTES - 1})


def test_short_hits_are_computed():
    drive = Drive(min_hit_tokens=13)
    drive.store("a")
    drive.add("b", "a")
    assert drive.find("b") == (0, False)
    drive.allocate("b", 0)
    assert drive.stat("skipped_short_tokens") == 12


def test_blocks_that_the_host_dropped_are_offered_again():
    drive = Drive(num_cpu_blocks=3)
    drive.store("a")
    drive.store("b", first_gpu_id=10)
    assert drive.stat("evicted_blocks") == 3
    assert drive.store("c", content="a").stores[:, 0].tolist() == [1, 2, 3]


def test_second_use():
    drive = Drive(store_mode="second_use")
    assert drive.store("a").store_ticket is None
    assert drive.stat("first_use_blocks") == 3
    plan = drive.store("b", content="a", first_gpu_id=10)
    assert plan.stores[:, 0].tolist() == [10, 11, 12]


def test_lazy_stores_the_victims_and_gives_them_their_place_back():
    drive = Drive(store_mode="lazy", num_gpu_blocks=16)
    for block_id, digest in zip((1, 2, 9), hashes("a", 3), strict=True):
        drive.pool.blocks[block_id].block_hash = digest + b"\0\0\0\0"
    drive.add("x")
    assert drive.step().store_ticket is None  # nothing is about to be reused
    plan = drive.step(x=1)
    # Half of the pool is looked at.
    assert plan.stores[:, 0].tolist() == [1, 2]
    assert drive.pool.held == {1, 2}
    drive.end(plan.store_ticket)
    assert [block.block_id for block in drive.pool.free_block_queue.order[:3]] == [1, 2, 3]
    drive.add("b", "a")
    assert drive.find("b") == (8, True)
    assert drive.step(x=1).store_ticket is None


def failed_load(drive, failed, **request):
    drive.store("a")
    drive.add("b", "a", first_gpu_id=20)
    num_tokens, is_async = drive.find("b")
    drive.allocate("b", num_tokens)
    (load,) = drive.step(**request).loads
    drive.end(load.ticket, failed)
    return is_async


def test_a_failed_load_is_withdrawn_and_stored_anew():
    drive = Drive()
    assert failed_load(drive, [1])
    assert drive.stat("withdrawn_blocks") == 1
    drive.add("c", "a")
    assert drive.find("c") == (4, True)
    assert drive.pool.evicted == set()
    assert drive.step(b=13).stores[:, 0].tolist() == [21]


def test_a_failed_load_within_the_step_leaves_vllms_cache():
    drive = Drive(same_step_loads=True)
    drive.side.costs.loads.add(1e9, 1)
    assert not failed_load(drive, [1, 2], b=1)
    assert drive.pool.evicted == {21, 22}


def test_what_was_lost_between_asking_and_loading_is_told_to_the_worker():
    drive = Drive(num_cpu_blocks=3)
    drive.store("a")
    drive.add("b", "a", first_gpu_id=20)
    assert drive.find("b") == (12, True)
    drive.store("c", first_gpu_id=10)  # takes the slots
    drive.allocate("b", 12)
    (load,) = drive.step().loads
    assert load.ticket is None
    assert load.pairs[:, 1].tolist() == [20, 21, 22]
    assert drive.stat("loads_lost_blocks") == 3
    assert not drive.side.has_open_tickets


def test_a_request_that_is_dropped_leaves_its_copies_going():
    drive = Drive()
    drive.store("a")
    drive.add("b", "a", first_gpu_id=20)
    drive.allocate("b", drive.find("b")[0])
    (load,) = drive.step().loads
    drive.side.drop("b")
    assert drive.side.has_open_tickets
    drive.end(load.ticket, failed=[0])
    assert not drive.side.has_open_tickets
    drive.side.table.audit()


def test_a_reset_waits_for_loads_and_forgets_stores():
    drive = Drive()
    drive.store("a")
    drive.add("b", "a", first_gpu_id=20)
    drive.allocate("b", drive.find("b")[0])
    (load,) = drive.step().loads
    assert not drive.side.reset()
    drive.end(load.ticket)
    request = drive.add("c", first_gpu_id=30)
    plan = drive.step(c=12)
    assert drive.side.reset()
    assert drive.pool.held == {30, 31, 32}
    drive.end(plan.store_ticket)
    assert drive.pool.held == set()
    assert drive.stat("cpu_cached_blocks") == 0
    # A request that goes on after new weights is computed anew, and offered anew.
    request.num_computed_tokens = 0
    assert drive.step(c=12).stores[:, 0].tolist() == [30, 31, 32]


def test_a_dead_rank_ends_loads_and_stores():
    drive = Drive(ranks=2)
    drive.store("a")
    drive.add("b", first_gpu_id=20)
    plan = drive.step(b=13)
    drive.end(plan.store_ticket, failed=[0, 1, 2], rank=0, dead=True)
    assert drive.stat("is_without_tier") == 1
    assert drive.pool.held == {20, 21, 22}  # the other rank still reads them
    drive.end(plan.store_ticket, rank=1)
    assert drive.pool.held == set()
    drive.add("c", "a")
    assert drive.find("c") == (0, False)
    assert drive.step(c=13).store_ticket is None


def test_each_death_is_told_once():
    drive = Drive(ranks=2)
    assert drive.side.take(Acknowledgements(0, [], [1]))
    assert not drive.side.take(Acknowledgements(0, [], [0]))
