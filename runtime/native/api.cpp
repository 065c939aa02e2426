// The C border: faults become codes, sentences are kept per thread.
#include <sched.h>

#include <cstdarg>
#include <cstdio>
#include <exception>
#include <new>

#include "engine.h"
#include "fault.h"
#include "placement.h"

#define DI_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

thread_local std::string last_sentence;

int fault(int code, const std::string& sentence) {
    last_sentence = sentence;
    return code;
}

template <class Body>
int guarded(Body body) {
    try {
        body();
        return 0;
    } catch (const Fault& f) {
        return fault(f.code, f.sentence);
    } catch (const std::bad_alloc&) {
        return fault(DI_NO_MEMORY, "the runner has no memory for its own tables");
    } catch (const std::exception& e) {
        return fault(DI_BAD_CALL, e.what());
    }
}

template <class Body>
int guarded(const DiEngine* engine, Body body) {
    return engine ? guarded(body) : fault(DI_BAD_CALL, "there is no engine");
}

}  // namespace

void fail(int code, const char* format, ...) {
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    std::string text((size_t)std::vsnprintf(nullptr, 0, format, args), '\0');
    std::vsnprintf(&text[0], text.size() + 1, format, again);
    va_end(again);
    va_end(args);
    throw Fault{code, text};
}

DI_EXPORT const char* di_error(void) { return last_sentence.c_str(); }

DI_EXPORT int di_abi(void) { return DI_ABI; }

DI_EXPORT int di_open(const char* engine_lib_dir, DiEngine** out) {
    return guarded([&] { *out = open_engine(engine_lib_dir).release(); });
}

DI_EXPORT void di_close(DiEngine* engine) { delete engine; }

DI_EXPORT int di_memory(DiEngine* engine, int32_t slots, int32_t blocks, int32_t threads, int64_t bytes[5]) {
    return guarded(engine, [&] {
        Layout l = engine->layout(slots, blocks, threads);
        bytes[0] = l.arena;
        bytes[1] = l.scratch;
        bytes[2] = l.rings;
        bytes[3] = l.pages;
        bytes[4] = l.drawing;
    });
}

DI_EXPORT int di_allocate(DiEngine* engine, int32_t slots, int32_t blocks, int32_t threads) {
    return guarded(engine, [&] { engine->allocate(slots, blocks, threads); });
}

DI_EXPORT int di_bind(DiEngine* engine, int32_t index, int32_t i, const void* data, const void* scale) {
    return guarded(engine, [&] { engine->bind(index, i, data, scale); });
}

DI_EXPORT int di_tables(DiEngine* engine, int32_t in_memory) {
    return guarded(engine, [&] { engine->tables(in_memory != 0); });
}

DI_EXPORT int di_run(DiEngine* engine, const char* entry, int32_t seqs, const DiSeq* seq, const int64_t* token_ids,
                     const int64_t* lookback, const int32_t* const* pins) {
    return guarded(engine, [&] { engine->run(entry, seqs, seq, token_ids, lookback, pins); });
}

DI_EXPORT int di_begin(DiEngine* engine, int32_t slot, const DiSampling* how, const int64_t* prompt, int64_t prompt_ids,
                       const int64_t* answer, int64_t answer_ids) {
    return guarded(engine, [&] { engine->begin(slot, how, prompt, prompt_ids, answer, answer_ids); });
}

DI_EXPORT int di_step(DiEngine* engine, const DiWork* work, const DiOutcome* out) {
    return guarded(engine, [&] { engine->loop_step(work, out); });
}

DI_EXPORT int di_submit(DiEngine* engine, const DiWork* work, const DiOutcome* out) {
    return guarded(engine, [&] { engine->submit(work, out); });
}

DI_EXPORT int di_finish(DiEngine* engine) {
    return guarded(engine, [&] { engine->finish(); });
}

DI_EXPORT int di_sends_ahead(DiEngine* engine, int32_t* yes) {
    return guarded(engine, [&] { *yes = engine->sends_ahead(); });
}

DI_EXPORT int di_output(DiEngine* engine, const char* entry, const char* name, const void** data, int64_t* rows,
                        int64_t* row_bytes) {
    return guarded(engine, [&] { engine->output(entry, name, data, rows, row_bytes); });
}

DI_EXPORT int di_state(DiEngine* engine, const char* name, int32_t unit, void** data, int64_t* bytes) {
    return guarded(engine, [&] { engine->state(name, unit, data, bytes); });
}

DI_EXPORT int di_profile(DiEngine* engine, int32_t on, const double** times, int32_t* launches) {
    return guarded(engine, [&] { engine->profile(on != 0, times, launches); });
}

DI_EXPORT int di_device(DiEngine* engine, const char** name, int64_t memory[2]) {
    return guarded(engine, [&] { *name = engine->device(memory); });
}

DI_EXPORT int di_room(DiEngine* engine, int64_t bytes, void** data) {
    return guarded(engine, [&] { *data = engine->room(bytes); });
}

DI_EXPORT int di_copy(DiEngine* engine, void* to, const void* from, int64_t bytes) {
    return guarded(engine, [&] { engine->copy(to, from, bytes); });
}

DI_EXPORT int di_warm(DiEngine* engine) {
    return guarded(engine, [&] { engine->warm(); });
}

DI_EXPORT int di_place(DiEngine* engine, const int32_t* cpus, int32_t count) {
    if (!engine || count < 0 || (count && !cpus)) return DI_BAD_CALL;
    for (int32_t i = 0; i < count; ++i) {
        if (cpus[i] < 0 || cpus[i] >= CPU_SETSIZE) return DI_BAD_CALL;
    }
    engine->place(cpus, count);
    return 0;
}
