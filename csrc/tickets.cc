// Tickets: what is enqueued for one, and its end. No call waits for the device.
#include "copier.h"

using namespace kvtier;

namespace {

int32_t check_batch(const kvtier_copier& copier, const kvtier_batch* batch, kvtier_error* error) {
    const auto bad = [&](const char* what) { return fail(error, KVTIER_BAD_ARGUMENT, 0, "%s", what); };
    if (batch == nullptr) return bad("batch = NULL");
    if (batch->direction > KVTIER_STORE) return bad("direction: neither KVTIER_LOAD nor KVTIER_STORE");
    if (batch->num_waves == 0 || batch->num_waves > KVTIER_MAX_WAVES) return bad("num_waves: 1 .. 1024");
    if (batch->after_mark == 0 || batch->after_mark > copier.last_mark)
        return bad("after_mark: not a mark of this copier");
    if ((batch->num_pieces > 0 && batch->pieces == nullptr) || (batch->num_groups > 0 && batch->groups == nullptr))
        return bad("pieces, groups: NULL");
    for (uint32_t i = 0; i < batch->num_pieces; ++i) {
        const kvtier_piece& it = batch->pieces[i];
        if (it.row_bytes == 0 || it.num_rows == 0) return bad("a piece without bytes");
        if (it.num_rows > 1 && (it.source_stride < it.row_bytes || it.destination_stride < it.row_bytes))
            return bad("a piece whose stride is less than its row");
    }
    uint32_t wave = 0;
    for (uint32_t i = 0; i < batch->num_groups; ++i) {
        const kvtier_group& it = batch->groups[i];
        if (it.path > KVTIER_GATHER) return bad("path: not one of kvtier_path");
        if (it.wave < wave || it.wave >= batch->num_waves) return bad("wave: falling, or not less than num_waves");
        if (it.first_piece > batch->num_pieces || it.num_pieces > batch->num_pieces - it.first_piece)
            return bad("a group beyond num_pieces");
        wave = it.wave;
        if (it.path != KVTIER_GATHER || batch->direction != KVTIER_STORE) continue;
        uint64_t filled = 0;
        for (uint32_t j = 0; j < it.num_pieces; ++j) {
            const kvtier_piece& piece = batch->pieces[it.first_piece + j];
            if (piece.num_rows != it.span.num_rows || piece.destination < it.span.destination ||
                piece.destination - it.span.destination + piece.row_bytes > it.span.row_bytes ||
                piece.destination_stride != it.span.destination_stride ||
                it.span.row_bytes > it.span.destination_stride)
                return bad("a piece outside of its group's span");
            filled += piece.row_bytes;
        }
        // What no piece fills would be overwritten by whatever the staging memory holds.
        if (filled != it.span.row_bytes) return bad("pieces that do not fill their group's span");
    }
    for (const auto& open : copier.open)
        for (const OpenTicket& it : open)
            if (it.ticket == batch->ticket) return bad("ticket: already open");
    return KVTIER_OK;
}

// A mark that is no longer in the ring was seen to be finished when its place was taken.
int32_t wait_for_mark(kvtier_copier& copier, const kvtier_batch& batch, kvtier_error* error) {
    const Mark& mark = copier.marks[batch.after_mark % kNumMarks];
    if (mark.id != batch.after_mark) return KVTIER_OK;
    const cudaError_t code = cudaStreamWaitEvent(copier.streams[batch.direction], mark.event, 0);
    return code == cudaSuccess ? static_cast<int32_t>(KVTIER_OK) : note_own(copier, error, code, "cudaStreamWaitEvent");
}

// Enqueues all groups and the waves' events, up to the first failure; the ticket then ends with what was enqueued.
void enqueue(kvtier_copier& copier, const kvtier_batch& batch, OpenTicket& ticket) {
    const cudaStream_t stream = copier.streams[batch.direction];
    uint32_t group = 0;
    for (uint32_t wave = 0; wave < batch.num_waves; ++wave) {
        cudaError_t code = cudaSuccess;
        const char* call = "";
        for (; group < batch.num_groups && batch.groups[group].wave == wave && code == cudaSuccess; ++group) {
            try {
                code = copy_group(copier, batch, batch.groups[group], &call);
            } catch (const std::bad_alloc&) {
                code = cudaErrorMemoryAllocation;
                call = "host memory is short";
            }
        }
        const bool failed = code != cudaSuccess;
        if (failed) note_own(copier, &ticket.error, code, call);
        code = cudaEventRecord(ticket.waves[wave], stream);
        ticket.end_is_recorded = code == cudaSuccess;
        if (ticket.end_is_recorded) ++ticket.num_recorded;
        if (code != cudaSuccess && !failed) note_own(copier, &ticket.error, code, "cudaEventRecord");
        if (failed || code != cudaSuccess) {
            const int32_t cuda_code = ticket.error.cuda_code;
            ticket.error.status = copier.lost.status != KVTIER_OK ? KVTIER_DEVICE_LOST : KVTIER_COPY_FAILED;
            ticket.error.cuda_code = cuda_code;
            if (code != cudaSuccess) cudaGetLastError();
            return;
        }
    }
}

// Whether everything that was enqueued for a ticket has run. A lost device runs nothing any more.
bool has_ended(kvtier_copier& copier, int direction, OpenTicket& ticket) {
    if (copier.lost.status == KVTIER_OK) {
        const cudaError_t code = ticket.end_is_recorded ? cudaEventQuery(ticket.waves[ticket.num_recorded - 1])
                                                        : cudaStreamQuery(copier.streams[direction]);
        if (code == cudaErrorNotReady) {
            cudaGetLastError();
            return false;
        }
        if (code == cudaSuccess) return true;
        kvtier_error error;
        const int32_t status = note_own(copier, &error, code, "cudaEventQuery");
        // Whatever else a query may say, it does not say that the copies have ended.
        if (status != KVTIER_DEVICE_LOST) return false;
    }
    ticket.error = copier.lost;
    return true;
}

}  // namespace

int32_t kvtier_cuda_submit(kvtier_copier* copier, const kvtier_batch* batch, kvtier_error* error) {
    return on_copier(copier, error, [&]() -> int32_t {
        if (int32_t status = refuse_if_lost(*copier, error)) return status;
        if (int32_t status = check_batch(*copier, batch, error)) return status;
        // Everything that can be short is taken before the first copy: a refusal leaves nothing enqueued.
        auto& open = copier->open[batch->direction];
        open.push_back({batch->ticket, {}, 0, false, {}});
        OpenTicket& ticket = open.back();
        int32_t status = KVTIER_OK;
        try {
            ticket.waves.reserve(batch->num_waves);
            size_t num_events = copier->free_events.size() + batch->num_waves + kNumMarks;
            for (const auto& each : copier->open)
                for (const OpenTicket& it : each) num_events += it.waves.size();
            copier->free_events.reserve(num_events);
        } catch (const std::bad_alloc&) {
            open.pop_back();
            throw;
        }
        for (uint32_t i = 0; i < batch->num_waves && status == KVTIER_OK; ++i) {
            cudaEvent_t event;
            status = new_event(*copier, &event, error);
            if (status == KVTIER_OK) ticket.waves.push_back(event);
        }
        if (status == KVTIER_OK) status = wait_for_mark(*copier, *batch, error);
        if (status != KVTIER_OK) {
            release_events(*copier, ticket);
            open.pop_back();
            return status;
        }
        enqueue(*copier, *batch, ticket);
        return KVTIER_OK;
    });
}

int32_t kvtier_cuda_wait_layer(kvtier_copier* copier, uint64_t ticket, uint32_t wave, uint64_t stream,
                               kvtier_error* error) {
    return on_copier(copier, error, [&]() -> int32_t {
        if (int32_t status = refuse_if_lost(*copier, error)) return status;
        const auto handle = reinterpret_cast<cudaStream_t>(stream);
        for (auto& open : copier->open) {
            for (OpenTicket& it : open) {
                if (it.ticket != ticket) continue;
                if (wave >= it.waves.size())
                    return fail(error, KVTIER_BAD_ARGUMENT, 0, "wave = %u: not less than num_waves", wave);
                if (int32_t status = refuse_capture(*copier, handle, error)) return status;
                const bool failed = it.error.status != KVTIER_OK;
                // The last event recorded by a failed ticket stands for a wave that is not complete.
                const uint32_t whole = failed && it.end_is_recorded ? it.num_recorded - 1 : it.num_recorded;
                if (it.num_recorded > 0) {
                    const uint32_t last = wave < it.num_recorded ? wave : it.num_recorded - 1;
                    if (cudaError_t code = cudaStreamWaitEvent(handle, it.waves[last], 0))
                        return note(*copier, error, code, "cudaStreamWaitEvent");
                }
                if (wave < whole) return KVTIER_OK;
                if (error != nullptr) *error = it.error;
                return KVTIER_COPY_FAILED;
            }
        }
        return fail(error, KVTIER_UNKNOWN_TICKET, 0, "ticket = %llu: not open",
                    static_cast<unsigned long long>(ticket));
    });
}

int32_t kvtier_cuda_poll(kvtier_copier* copier, kvtier_report* out, size_t capacity, size_t* num_out,
                         kvtier_error* error) {
    return on_copier(copier, error, [&]() -> int32_t {
        if (num_out == nullptr || (capacity > 0 && out == nullptr))
            return fail(error, KVTIER_BAD_ARGUMENT, 0, "out, num_out: NULL");
        *num_out = 0;
        for (int direction : {KVTIER_LOAD, KVTIER_STORE}) {
            auto& open = copier->open[direction];
            while (!open.empty() && *num_out < capacity && has_ended(*copier, direction, open.front())) {
                OpenTicket& it = open.front();
                out[(*num_out)++] = {it.ticket, it.error};
                if (it.error.status != KVTIER_OK) ++copier->counts.num_failed_tickets;
                release_events(*copier, it);
                open.pop_front();
            }
        }
        return KVTIER_OK;
    });
}
