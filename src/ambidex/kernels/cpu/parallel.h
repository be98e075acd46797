// A group of threads that run one kernel at a time, all of them together.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
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

    int id() const { return id_; }
    int count() const;

    // Waits until every worker of the group is here.
    void barrier();

    // The next of `num_chunks` chunks of work to do, or -1 when all are taken. A worker gets its
    // own share first, which is the same one every time, then what others have not begun. Which
    // worker does a chunk must not change the result.
    int64_t next(int64_t num_chunks);

    // At least `num_bytes` of memory of this worker, 64-byte aligned; the content does not
    // survive the kernel.
    std::byte* scratch(size_t num_bytes);

    // The memory that the workers share, as large as any submitted kernel asked for.
    std::byte* shared() const;

  private:
    friend class ThreadGroup;
    struct FreeAligned {
        void operator()(std::byte* memory) const;
    };
    ThreadGroup& group_;
    int id_;
    size_t scratch_bytes_ = 0;
    std::unique_ptr<std::byte, FreeAligned> scratch_;
};

class ThreadGroup {
  public:
    using Job = void (*)(void* data, Worker& worker);

    // `cpus`: where each thread is pinned; the calling thread is worker 0 and is pinned by its
    // owner. Empty: nothing is pinned.
    ThreadGroup(int num_threads, std::vector<int> cpus);
    ~ThreadGroup();
    ThreadGroup(const ThreadGroup&) = delete;
    ThreadGroup& operator=(const ThreadGroup&) = delete;

    int size() const { return num_threads_; }

    // Runs `job` on all workers, this thread being worker 0; returns when all are done. One
    // caller at a time.
    void run(Job job, void* data);

    // Makes the memory that workers share at least this large. Not while a job runs.
    void reserve_shared(size_t num_bytes);

  private:
    friend class Worker;
    struct alignas(64) Counter {
        std::atomic<int64_t> value{0};
    };
    void thread_main(int id);
    void wait_at_barrier();

    const int num_threads_;
    const std::vector<int> cpus_;
    std::vector<std::unique_ptr<Worker>> workers_;
    std::vector<std::thread> threads_;
    std::unique_ptr<Counter[]> taken_;
    alignas(64) std::atomic<uint32_t> epoch_{0};  // raised once a job, and to end
    alignas(64) std::atomic<uint32_t> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};  // raised once a barrier
    Job job_ = nullptr;
    void* data_ = nullptr;
    std::atomic<bool> ending_{false};
    size_t shared_bytes_ = 0;
    std::unique_ptr<std::byte, Worker::FreeAligned> shared_;
};

}  // namespace ambidex
