"""The decode actor: plan a step, run it, apply it, deliver."""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial

import trio

from llamad_trio.core.config import LaneLike
from llamad_trio.core.errors import EngineClosed, LlamadError
from llamad_trio.engine.reporter import Reporter
from llamad_trio.engine.store import SnapshotStore, StoreActor
from llamad_trio.engine.ticket import Ticket
from llamad_trio.scheduling.plan import Prepared, StepPlan, StepResult, StepStatus
from llamad_trio.scheduling.run import Event, Failed, Finished, Piece
from llamad_trio.scheduling.runtime import Runtime
from llamad_trio.scheduling.scheduler import Scheduler
from llamad_trio.scheduling.shelf import Snapshot
from llamad_trio.system.nursery import ends_in_order, new_shield, open_plain_nursery


class DecodeActor:
    """Owns the scheduler and every live ticket of one engine.

    Prepared requests come in the order of their tickets; prefixes that leave RAM go to `store`,
    if there is one; `weight` is for `Lane.run`.
    """

    def __init__(
        self,
        runtime: Runtime,
        lane: LaneLike,
        scheduler: Scheduler,
        inbox: trio.MemoryReceiveChannel[Prepared],
        reporter: Reporter,
        store: SnapshotStore | None = None,
        weight: int = 1,
    ) -> None:
        self.scheduler = scheduler
        self.outcomes: Counter[str] = Counter()
        self.closed: LlamadError | None = None
        self._runtime = runtime
        self._lane = lane
        self._weight = weight
        self._inbox = inbox
        self._reporter = reporter
        self._tickets: dict[int, Ticket] = {}
        self._bell = trio.Event()
        self._store: StoreActor | None = None
        if store is not None:
            self._store = StoreActor(store, scheduler.shelf.add_stored, self._take_read)

    # -- from any task of the run: never blocks ---------------------------------------------

    @property
    def n_live(self) -> int:
        """Requests that have no outcome yet."""
        return len(self._tickets)

    def register(self, ticket: Ticket) -> None:
        """From now on the ticket gets its outcome here."""
        self._tickets[ticket.id] = ticket
        self._reporter.tell_queued(ticket)

    def is_live(self, ticket: Ticket) -> bool:
        """Whether the ticket still waits for its outcome."""
        return ticket.id in self._tickets

    def wake(self) -> None:
        """Something has changed: look again for work."""
        self._bell.set()

    def resume(self, ticket_id: int) -> None:
        """A reader has caught up."""
        self.scheduler.resume(ticket_id)
        self.wake()

    def reject(self, ticket: Ticket, error: LlamadError) -> None:
        """The request cannot even start."""
        if self._tickets.pop(ticket.id, None):
            self._fail(ticket, error)

    def withdraw(self, ticket: Ticket) -> None:
        """Its caller has left: if it has no outcome yet, it is cancelled.

        A step that is running only for cancelled requests is aborted.
        """
        if self._tickets.pop(ticket.id, None) is None:
            return
        self.outcomes["cancelled"] += 1
        self._reporter.tell_cancelled(ticket)
        self.scheduler.cancel(ticket.id)
        if self.scheduler.in_flight_is_unwanted:
            self._runtime.request_abort()
        self.wake()

    def close(self, error: LlamadError, reason: str | None = None) -> None:
        """Take nothing any more; every request still without an outcome gets this error.

        `reason` says what broke, if anything did.  Called again, it does nothing.
        """
        if self.closed is not None:
            return
        self.closed = error
        self.scheduler.fail_all(error)
        for ticket in self._tickets.values():
            self._fail(ticket, copy.copy(error))
        self._tickets.clear()
        self._reporter.tell_stopped(reason)

    def closed_error(self) -> LlamadError:
        """Why the engine takes nothing any more: a copy, to be raised by one task."""
        return EngineClosed() if self.closed is None else copy.copy(self.closed)

    # -- the actor --------------------------------------------------------------------------

    @ends_in_order
    async def run(self) -> None:
        """Run until cancelled, or until the engine is beyond repair (`SessionFatal`)."""
        end: LlamadError = EngineClosed()
        reason: str | None = None
        orderly = False
        try:
            async with open_plain_nursery() as nursery:
                if self._store is not None:
                    nursery.start_soon(self._store.run)
                await self._run_steps()
        except LlamadError as error:
            end, reason = error, str(error)
            raise
        except trio.Cancelled:
            orderly = True
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            self.close(end, reason)
            if orderly and self._store is not None:
                with new_shield():
                    await self._save_all(self._store)

    async def _run_steps(self) -> None:
        while True:
            await trio.lowlevel.checkpoint_if_cancelled()  # a block may end before this begins
            self._bell = trio.Event()
            self._take_arrivals()
            plan = self.scheduler.plan()
            self._report_plan(plan)
            self._exchange_with_store()
            if plan is None:
                await self._bell.wait()
                continue
            n_running = self.scheduler.n_running
            result = await self._step(plan)
            # Closed meanwhile, with the result already on its way: the books are closed, too.
            await trio.lowlevel.checkpoint_if_cancelled()
            self._report_step(plan, result, n_running)
            threads = self.scheduler.threads.in_force
            self._deliver(self.scheduler.apply(result))
            if threads != self.scheduler.threads.in_force:
                self._reporter.tell_threads(*self.scheduler.threads.in_force)

    def _exchange_with_store(self) -> None:
        if self._store is not None:
            for snapshot in self.scheduler.shelf.take_leaving():
                self._store.write(snapshot)
            for key in self.scheduler.take_wanted():
                self._store.fetch(key)

    def _take_read(self, key: int, snapshot: Snapshot | None) -> None:
        self.scheduler.shelf.add_read(key, snapshot)
        self.wake()

    async def load_index(self) -> None:
        """Make known what is on disk, before the first request."""
        if self._store is not None:
            await self._store.load_index()

    async def _save_all(self, store: StoreActor) -> None:
        """Write what is worth keeping over a restart."""
        result = await self._step(self.scheduler.plan_saving())
        await store.write_now(self.scheduler.take_saved(result))

    async def _step(self, plan: StepPlan) -> StepResult:
        self._runtime.clear_abort()
        step = partial(self._runtime.step, plan)
        return await self._lane.run(
            step, abort=self._runtime.request_abort, engine=self, weight=self._weight
        )

    def _take_arrivals(self) -> None:
        while True:
            try:
                prepared = self._inbox.receive_nowait()
            except (trio.WouldBlock, trio.EndOfChannel):
                return
            if ticket := self._tickets.get(prepared.id):
                ticket.prompt_tokens = len(prepared.tokens)
                self.scheduler.submit(prepared)

    def _report_plan(self, plan: StepPlan | None) -> None:
        for ticket_id in self.scheduler.take_preempted():
            # One that never was in a step has not lost anything.
            if (ticket := self._tickets.get(ticket_id)) and ticket.has_begun:
                self._reporter.tell_preempted(ticket)
        for work in plan.work if plan is not None else ():
            ticket = self._tickets[work.request_id]
            if ticket.begin():
                self._reporter.tell_started(ticket, cached_tokens=work.pos)

    def _report_step(self, plan: StepPlan, result: StepResult, n_running: int) -> None:
        stands = result.status is StepStatus.DONE
        self._reporter.tell_step(
            duration_s=result.elapsed_s if stands else 0.0,
            decode_tokens=plan.n_generated if stands else 0,
            prefill_tokens=plan.n_tokens - plan.n_generated if stands else 0,
            aborted=result.status is StepStatus.ABORTED,
            slots_in_use=n_running,
        )
        for ticket_id in result.sampled:
            if (ticket := self._tickets.get(ticket_id)) and ticket.token_sampled():
                self._reporter.tell_first_token(ticket)

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Piece(id=ticket_id, text=text):
                    if not self._tickets[ticket_id].put(text):
                        self.scheduler.pause(ticket_id)
                case Finished(id=ticket_id):
                    self.outcomes["completed"] += 1
                    ticket = self._tickets.pop(ticket_id)
                    self._reporter.tell_finished(ticket, ticket.finish(event))
                case Failed(id=ticket_id, error=error):
                    self._fail(self._tickets.pop(ticket_id), error)

    def _fail(self, ticket: Ticket, error: LlamadError) -> None:
        self.outcomes["failed"] += 1
        ticket.fail(error)
        self._reporter.tell_failed(ticket, error)
