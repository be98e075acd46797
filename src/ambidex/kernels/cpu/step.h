// What varies from one step to the next: kernels read it when they run, so a recorded program
// serves every batch.
#pragma once

#include <cstdint>

namespace ambidex {

// For what files of several levels share: an out-of-line copy could be the one with the widest
// instructions, on a machine that lacks them.
#define AMBIDEX_INLINE inline __attribute__((always_inline))

constexpr int kMaxGroups = 8;

// Block tables of one KV group: row i holds the blocks of sequence i, -1 where there is none.
struct GroupTables {
    const int32_t* tables = nullptr;
    int64_t stride = 0;  // blocks a row
};

struct StepParams {
    int64_t num_tokens = 0;
    const int64_t* token_ids = nullptr;  // [num_tokens]
    const int64_t* positions = nullptr;  // [num_tokens]
    int64_t num_sequences = 0;
    const int32_t* query_starts = nullptr;  // [num_sequences + 1]
    const int32_t* context_lens = nullptr;  // [num_sequences], this step's tokens included
    int64_t num_logit_rows = 0;
    const int32_t* logit_rows = nullptr;  // [num_logit_rows] rows whose logits are wanted
    GroupTables groups[kMaxGroups];
};

// A number of rows: fixed where a kernel runs at once, read from the step where it is replayed.
struct Rows {
    // The number itself; or one of the two below; or, negated, the address of an int64 that an
    // earlier kernel of the step has written.
    int64_t code = 0;

    static constexpr int64_t kTokens = -1;
    static constexpr int64_t kLogits = -2;

    AMBIDEX_INLINE int64_t count(const StepParams& step) const {
        if (code >= 0) return code;
        if (code == kTokens) return step.num_tokens;
        if (code == kLogits) return step.num_logit_rows;
        return *reinterpret_cast<const int64_t*>(-code);
    }
};

}  // namespace ambidex
