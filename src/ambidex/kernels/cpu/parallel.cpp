#include "parallel.h"

#include <cstdlib>
#include <new>
#include <utility>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace ambidex {

namespace {

constexpr size_t kAlignment = 64;
// Looks at a changing number this often before the thread sleeps: about 50 microseconds.
constexpr int kSpins = 4000;

std::byte* allocate_aligned(size_t num_bytes) {
    size_t rounded = (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
    void* memory = std::aligned_alloc(kAlignment, rounded);
    if (memory == nullptr) throw std::bad_alloc();
    return static_cast<std::byte*>(memory);
}

inline void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Returns once `value` is no longer `old`.
void wait_for_change(const std::atomic<uint32_t>& value, uint32_t old) {
    for (int spin = 0; spin < kSpins; ++spin) {
        if (value.load(std::memory_order_acquire) != old) return;
        pause_cpu();
    }
    value.wait(old, std::memory_order_acquire);
}

void pin_to(int cpu) {
#if defined(__linux__)
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
#else
    (void)cpu;
#endif
}

}  // namespace

void Worker::FreeAligned::operator()(std::byte* memory) const { std::free(memory); }

int Worker::count() const { return group_.num_threads_; }

void Worker::barrier() { group_.wait_at_barrier(); }

std::byte* Worker::shared() const { return group_.shared_.get(); }

std::byte* Worker::scratch(size_t num_bytes) {
    if (num_bytes > scratch_bytes_) {
        scratch_.reset(allocate_aligned(num_bytes));
        scratch_bytes_ = num_bytes;
    }
    return scratch_.get();
}

int64_t Worker::next(int64_t num_chunks) {
    int count = group_.num_threads_;
    for (int step = 0; step < count; ++step) {
        int owner = (id_ + step) % count;
        int64_t first = num_chunks * owner / count;
        int64_t size = num_chunks * (owner + 1) / count - first;
        std::atomic<int64_t>& taken = group_.taken_[owner].value;
        if (taken.load(std::memory_order_relaxed) >= size) continue;
        int64_t index = taken.fetch_add(1, std::memory_order_relaxed);
        if (index < size) return first + index;
    }
    return -1;
}

ThreadGroup::ThreadGroup(int num_threads, std::vector<int> cpus)
    : num_threads_(num_threads),
      cpus_(std::move(cpus)),
      taken_(std::make_unique<Counter[]>(num_threads)) {
    for (int id = 0; id < num_threads_; ++id) {
        workers_.push_back(std::make_unique<Worker>(*this, id));
    }
    for (int id = 1; id < num_threads_; ++id) {
        threads_.emplace_back([this, id] { thread_main(id); });
    }
}

ThreadGroup::~ThreadGroup() {
    ending_.store(true, std::memory_order_release);
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void ThreadGroup::thread_main(int id) {
    if (!cpus_.empty()) pin_to(cpus_[id % cpus_.size()]);
    uint32_t seen = 0;
    while (true) {
        wait_for_change(epoch_, seen);
        seen = epoch_.load(std::memory_order_acquire);
        if (ending_.load(std::memory_order_acquire)) return;
        job_(data_, *workers_[id]);
        wait_at_barrier();
    }
}

void ThreadGroup::run(Job job, void* data) {
    job_ = job;
    data_ = data;
    if (num_threads_ > 1) {
        epoch_.fetch_add(1, std::memory_order_release);
        epoch_.notify_all();
    }
    job(data, *workers_[0]);
    wait_at_barrier();
}

void ThreadGroup::wait_at_barrier() {
    uint32_t phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == uint32_t(num_threads_)) {
        for (int id = 0; id < num_threads_; ++id) {
            taken_[id].value.store(0, std::memory_order_relaxed);
        }
        arrived_.store(0, std::memory_order_relaxed);
        phase_.fetch_add(1, std::memory_order_release);
        phase_.notify_all();
        return;
    }
    wait_for_change(phase_, phase);
}

void ThreadGroup::reserve_shared(size_t num_bytes) {
    if (num_bytes <= shared_bytes_) return;
    shared_.reset(allocate_aligned(num_bytes));
    shared_bytes_ = num_bytes;
}

}  // namespace ambidex
