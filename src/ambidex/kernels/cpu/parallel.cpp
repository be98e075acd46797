#include "parallel.h"

#include <chrono>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <utility>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#endif
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#endif

namespace ambidex {

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kAlignment = 64;
// A waiting thread first looks without pause. Longer would not be faster on quiet cores, and where
// the one that it waits for has no core (two engines on the same cores), all of it is lost at every
// barrier: 50 microseconds made a step of 120 kernels on one shared core 2.5 times as long as 2 did.
constexpr auto kSpin = std::chrono::microseconds(3);
// Then it lets others have the core between two looks, for as long as the Python of a decode step
// takes; waking a thread that sleeps costs a step about 50 microseconds. Then it sleeps.
constexpr auto kYield = std::chrono::microseconds(1000);

std::atomic<uint32_t> num_forks{0};

void count_forks() {
#if defined(__unix__) || defined(__APPLE__)
    static const int registered = pthread_atfork(
        nullptr, nullptr, [] { num_forks.fetch_add(1, std::memory_order_relaxed); });
    (void)registered;
#endif
}

std::byte* allocate_aligned(size_t num_bytes) {
    if (num_bytes > SIZE_MAX - kAlignment) throw std::bad_alloc();
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

void pin_to(int cpu) {
#if defined(__linux__)
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    // A core that has gone since the plan was made: the thread runs where the system puts it.
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
#else
    (void)cpu;
#endif
}

// While it lives, threads that are started get no signals: those are for Python's own thread,
// which is waiting for something that a signal must end.
class SignalsBlocked {
  public:
#if defined(__unix__) || defined(__APPLE__)
    SignalsBlocked() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

  private:
    sigset_t before_;
#endif
};

// Leaves the job of a worker whose group has failed.
struct Abandoned {};

}  // namespace

void ThreadGroup::Signal::add(uint32_t amount) {
    // In one total order with the sleeper's steps: it is seen here, or it sees the new value.
    value.fetch_add(amount, std::memory_order_seq_cst);
    wake();
}

void ThreadGroup::Signal::wake() {
    if (sleepers.load(std::memory_order_seq_cst) == 0) return;
#if defined(__linux__)
    syscall(SYS_futex, &value, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#else
    value.notify_all();
#endif
}

// Returns once the value is no longer `old`.
void ThreadGroup::Signal::wait_while(uint32_t old) {
    // The clock is read now and then only: reading it takes longer than a look.
    constexpr int kLooks = 32;
    Clock::time_point start;
    for (bool first = true;; first = false) {
        for (int look = 0; look < kLooks; ++look) {
            if (value.load(std::memory_order_acquire) != old) return;
            pause_cpu();
        }
        if (first) {
            start = Clock::now();
            continue;
        }
        Clock::time_point now = Clock::now();
        if (now - start < kSpin) continue;
        if (now - start >= kYield) break;
#if defined(__unix__) || defined(__APPLE__)
        sched_yield();
#endif
    }
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    while (value.load(std::memory_order_seq_cst) == old) {
#if defined(__linux__)
        syscall(SYS_futex, &value, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
#else
        value.wait(old, std::memory_order_seq_cst);
#endif
    }
    sleepers.fetch_sub(1, std::memory_order_relaxed);
}

void Worker::FreeAligned::operator()(std::byte* memory) const { std::free(memory); }

int Worker::count() const { return group_.num_threads_; }

std::byte* Worker::shared() const { return group_.shared_.get(); }

std::byte* Worker::scratch(size_t num_bytes) {
    if (num_bytes > scratch_bytes_) {
        scratch_.reset();  // so that the old and the new one are never held at once
        scratch_bytes_ = 0;
        scratch_.reset(allocate_aligned(num_bytes));
        scratch_bytes_ = num_bytes;
    }
    return scratch_.get();
}

void Worker::barrier() {
    group_.wait_at_barrier();
    begin_chunks();
}

// Between two barriers one bank of counters is in use, and each worker clears its own counter of
// the other, which nobody touches before the next barrier.
void Worker::begin_chunks() {
    bank_ ^= 1;
    group_.taken_[2 * id_ + (bank_ ^ 1)].value.store(0, std::memory_order_relaxed);
}

int64_t Worker::next(int64_t num_chunks) {
    int count = group_.num_threads_;
    for (int step = 0; step < count; ++step) {
        int owner = (id_ + step) % count;
        int64_t first = num_chunks * owner / count;
        int64_t size = num_chunks * (owner + 1) / count - first;
        std::atomic<int64_t>& taken = group_.taken_[2 * owner + bank_].value;
        // Looking first keeps the counter's line shared once a share is used up.
        if (taken.load(std::memory_order_relaxed) >= size) continue;
        int64_t index = taken.fetch_add(1, std::memory_order_relaxed);
        if (index < size) return first + index;
    }
    return -1;
}

ThreadGroup::ThreadGroup(int num_threads, std::vector<int> cpus)
    : num_threads_(num_threads),
      cpus_(std::move(cpus)),
      forks_((count_forks(), num_forks.load(std::memory_order_relaxed))),
      taken_(std::make_unique<Counter[]>(2 * num_threads)) {
    for (int id = 0; id < num_threads_; ++id) {
        workers_.push_back(std::make_unique<Worker>(*this, id));
    }
    SignalsBlocked blocked;
    try {
        for (int id = 1; id < num_threads_; ++id) {
            threads_->emplace_back([this, id] { thread_main(id); });
        }
    } catch (...) {
        end_threads();
        throw;
    }
}

ThreadGroup::~ThreadGroup() { end_threads(); }

void ThreadGroup::end_threads() {
    if (forks_ != num_forks.load(std::memory_order_relaxed)) {
        // The threads are the parent's: waiting for them would take for ever, and even detaching
        // them fails once a thread of this process has got the descriptor of one. Left behind.
        (void)threads_.release();
        return;
    }
    job_ = nullptr;
    epoch_.add(1);
    for (std::thread& thread : *threads_) thread.join();
}

void ThreadGroup::thread_main(int id) {
#if defined(__linux__)
    pthread_setname_np(pthread_self(), "ambidex-worker");
#endif
    if (!cpus_.empty()) pin_to(cpus_[id % cpus_.size()]);
    for (uint32_t seen = 0;; ++seen) {
        epoch_.wait_while(seen);
        if (job_ == nullptr) return;
        run_one(*workers_[id]);
        if (working_.fetch_sub(1, std::memory_order_acq_rel) == 1) done_.add(1);
    }
}

void ThreadGroup::run_one(Worker& worker) {
    worker.begin_chunks();
    try {
        job_(data_, worker);
    } catch (const Abandoned&) {
        // Another worker failed, and its error is the one to report.
        return;
    } catch (...) {
        fail(std::current_exception());
    }
}

void ThreadGroup::fail(std::exception_ptr error) {
    if ((phase_.value.fetch_or(1, std::memory_order_seq_cst) & 1) == 0) {
        // Read by worker 0 after everyone is done.
        error_ = std::move(error);
    }
    phase_.wake();
}

void ThreadGroup::run(Job job, void* data) {
    if (forks_ != num_forks.load(std::memory_order_relaxed)) {
        throw std::runtime_error(
            "this process was forked from the one that started the threads; start processes "
            "with the method 'spawn'");
    }
    job_ = job;
    data_ = data;
    uint32_t done = done_.value.load(std::memory_order_relaxed);
    if (num_threads_ > 1) {
        working_.store(uint32_t(num_threads_ - 1), std::memory_order_relaxed);
        epoch_.add(1);
    }
    run_one(*workers_[0]);
    if (num_threads_ > 1) done_.wait_while(done);
    if ((phase_.value.load(std::memory_order_relaxed) & 1) == 0) return;
    // Some workers left between two barriers: all begin anew.
    phase_.value.fetch_and(~1u, std::memory_order_relaxed);
    arrived_.store(0, std::memory_order_relaxed);
    for (std::unique_ptr<Worker>& worker : workers_) worker->bank_ = 0;
    for (int i = 0; i < 2 * num_threads_; ++i) taken_[i].value.store(0, std::memory_order_relaxed);
    std::rethrow_exception(std::exchange(error_, nullptr));
}

void ThreadGroup::wait_at_barrier() {
    uint32_t phase = phase_.value.load(std::memory_order_acquire);
    if ((phase & 1) != 0) throw Abandoned();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == uint32_t(num_threads_)) {
        arrived_.store(0, std::memory_order_relaxed);
        phase_.add(2);
        return;
    }
    phase_.wait_while(phase);
    if ((phase_.value.load(std::memory_order_acquire) & 1) != 0) throw Abandoned();
}

void ThreadGroup::reserve_shared(size_t num_bytes) {
    if (num_bytes <= shared_bytes_) return;
    shared_.reset();
    shared_bytes_ = 0;
    shared_.reset(allocate_aligned(num_bytes));
    shared_bytes_ = num_bytes;
}

size_t ThreadGroup::memory_bytes() const {
    size_t total = shared_bytes_;
    for (const auto& worker : workers_) total += worker->scratch_bytes_;
    return total;
}

}  // namespace ambidex
