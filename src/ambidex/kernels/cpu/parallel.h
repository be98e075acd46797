// A group of threads that run one kernel at a time, all of them together.
//
// Inside a job a thread that waits for the others spins for a moment, then gives the core to
// whoever wants it, then sleeps; between jobs it does the same, and an idle group uses no CPU.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <thread>
#include <vector>

namespace ambidex {

class ThreadGroup;

// One thread's view of the kernel that it runs. All workers of a group call barrier() equally
// often, and between two barriers at most one loop over next().
class Worker {
  public:
    Worker(ThreadGroup& group, int id) : group_(group), id_(id) {}

    __attribute__((always_inline)) int id() const { return id_; }
    int count() const;

    // Waits until every worker of the group is here. When a worker's job has thrown, those that
    // wait, and those that come later, leave their jobs from here (by an exception of the group).
    void barrier();

    // The next of `num_chunks` chunks of work to do, or -1 when all are taken. A worker gets its
    // own share first, which is the same one every time, then what others have not begun. Which
    // worker does a chunk must not change the result.
    int64_t next(int64_t num_chunks);

    // At least `num_bytes` of memory of this worker, 64-byte aligned; the content does not
    // survive the kernel. Throws std::bad_alloc.
    std::byte* scratch(size_t num_bytes);

    // The memory that the workers share, as large as any submitted kernel asked for.
    std::byte* shared() const;

  private:
    friend class ThreadGroup;
    struct FreeAligned {
        void operator()(std::byte* memory) const;
    };
    void begin_chunks();

    ThreadGroup& group_;
    int id_;
    int bank_ = 0;  // which of its two counters of taken chunks is in use
    size_t scratch_bytes_ = 0;
    std::unique_ptr<std::byte, FreeAligned> scratch_;
};

class ThreadGroup {
  public:
    using Job = void (*)(void* data, Worker& worker);

    // `cpus`: where each thread is pinned; the calling thread is worker 0 and is pinned by its
    // owner. Empty: nothing is pinned. Throws std::system_error when a thread cannot be had.
    ThreadGroup(int num_threads, std::vector<int> cpus);
    ~ThreadGroup();
    ThreadGroup(const ThreadGroup&) = delete;
    ThreadGroup& operator=(const ThreadGroup&) = delete;

    int size() const { return num_threads_; }

    // Runs `job` on all workers, this thread being worker 0; returns when all are done. One
    // caller at a time. Throws what the first worker that failed threw, when all have ended; the
    // group can be used again. Throws std::runtime_error in a forked child, which has no workers.
    void run(Job job, void* data);

    // Makes the memory that workers share at least this large. Not while a job runs.
    void reserve_shared(size_t num_bytes);

    // Bytes of the memory that workers share, and of their scratch memory. Not while a job runs.
    size_t memory_bytes() const;

  private:
    friend class Worker;
    // A number that threads wait for; the line is of its own.
    struct alignas(64) Signal {
        std::atomic<uint32_t> value{0};
        std::atomic<uint32_t> sleepers{0};

        void add(uint32_t amount);
        void wake();
        void wait_while(uint32_t old);
    };
    struct alignas(64) Counter {
        std::atomic<int64_t> value{0};
    };
    void thread_main(int id);
    void run_one(Worker& worker);
    void wait_at_barrier();
    void fail(std::exception_ptr error);
    void end_threads();

    const int num_threads_;
    const std::vector<int> cpus_;
    const uint32_t forks_;
    std::vector<std::unique_ptr<Worker>> workers_;
    // On the heap, so that a forked child can leave it behind.
    std::unique_ptr<std::vector<std::thread>> threads_ =
        std::make_unique<std::vector<std::thread>>();
    std::unique_ptr<Counter[]> taken_;  // two a worker
    Signal epoch_;                      // raised once a job; then job_ and data_ are set
    Job job_ = nullptr;                 // null: the threads end
    void* data_ = nullptr;
    Signal phase_;  // raised by two once a barrier; odd once a worker has failed
    Signal done_;   // raised when the last of the other workers is done
    alignas(64) std::atomic<uint32_t> arrived_{0};
    alignas(64) std::atomic<uint32_t> working_{0};
    std::exception_ptr error_;
    size_t shared_bytes_ = 0;
    std::unique_ptr<std::byte, Worker::FreeAligned> shared_;
};

}  // namespace ambidex
