// Runs kernels at once, or records them to be replayed.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "parallel.h"
#include "step.h"

namespace ambidex {

// Every kernel: all workers call it together, with the same arguments.
template <class Args>
using Kernel = void (*)(const Args& args, const StepParams& step, Worker& worker);

// A kernel and a copy of its arguments.
struct Call {
    static constexpr size_t kMaxBytes = 256;
    using Invoke = void (*)(const Call& call, const StepParams& step, Worker& worker);

    Invoke invoke;
    void (*kernel)();
    // The call is left out where this number is zero; null: it never is.
    const int64_t* condition = nullptr;
    alignas(16) std::byte args[kMaxBytes];

    template <class Args>
    Call(Kernel<Args> function, const Args& values) {
        static_assert(std::is_trivially_copyable_v<Args>);
        static_assert(sizeof(Args) <= kMaxBytes);
        kernel = reinterpret_cast<void (*)()>(function);
        std::memcpy(args, &values, sizeof values);
        invoke = [](const Call& call, const StepParams& step, Worker& worker) {
            auto function = reinterpret_cast<Kernel<Args>>(call.kernel);
            function(*reinterpret_cast<const Args*>(call.args), step, worker);
        };
    }
};

// A recorded step.
struct Program {
    std::vector<Call> calls;
};

enum class Level { kGeneric, kV3, kV4, kV4Vnni, kAmx };

// Throws: kernels, which see this file too, are compiled without exceptions.
[[noreturn]] void refuse_second_caller();

// Held while a context is used: its threads, their memory and its recording serve one caller.
class Claim {
  public:
    explicit Claim(std::atomic_flag& flag) : flag_(flag) {
        if (flag_.test_and_set(std::memory_order_acquire)) refuse_second_caller();
    }
    ~Claim() { flag_.clear(std::memory_order_release); }
    Claim(const Claim&) = delete;
    Claim& operator=(const Claim&) = delete;

  private:
    std::atomic_flag& flag_;
};

// A lane's threads, what it computes now, and what it records.
class Context {
  public:
    Context(Level level, int num_threads, std::vector<int> cpus)
        : level(level), threads(num_threads, std::move(cpus)) {}

    const Level level;
    ThreadGroup threads;
    StepParams step;
    std::shared_ptr<Program> recording;
    // Of the calls that are recorded now; see Call.
    const int64_t* condition = nullptr;
    int64_t num_runs = 0;  // how often the threads were started

    // Runs the kernel now, or appends it to the recording. `shared_bytes`: memory that its
    // workers share. The caller holds no GIL while this runs.
    template <class Args>
    void submit(Kernel<Args> kernel, const Args& args, size_t shared_bytes = 0) {
        Claim claim(in_use_);
        threads.reserve_shared(shared_bytes);
        Call call(kernel, args);
        if (recording) {
            call.condition = condition;
            recording->calls.push_back(call);
            return;
        }
        run(&call, 1);
    }

    void replay(const Program& program) {
        Claim claim(in_use_);
        run(program.calls.data(), program.calls.size());
    }

    // The same; returns the seconds that each call took, its barrier included.
    std::vector<double> replay_timed(const Program& program) {
        using Clock = std::chrono::steady_clock;
        Claim claim(in_use_);
        std::vector<double> seconds;
        for (const Call& call : program.calls) {
            Clock::time_point began = Clock::now();
            run(&call, 1);
            seconds.push_back(std::chrono::duration<double>(Clock::now() - began).count());
        }
        return seconds;
    }

  private:
    std::atomic_flag in_use_;

    struct Span {
        const Call* calls;
        size_t count;
        const StepParams* step;
    };

    void run(const Call* calls, size_t count) {
        Span span{calls, count, &step};
        ++num_runs;
        threads.run(
            [](void* data, Worker& worker) {
                const Span& span = *static_cast<const Span*>(data);
                bool is_first = true;
                for (size_t i = 0; i < span.count; ++i) {
                    const Call& call = span.calls[i];
                    // Written before the last barrier: all workers read the same.
                    if (call.condition != nullptr && *call.condition == 0) continue;
                    if (!is_first) worker.barrier();
                    is_first = false;
                    call.invoke(call, *span.step, worker);
                }
            },
            &span);
    }
};

}  // namespace ambidex
