// The thread group under stress, without Python, so that ThreadSanitizer can watch it:
// scripts/sanitize.sh. Ends with 0, or prints the first thing that is wrong.
#include "parallel.h"

#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

using ambidex::ThreadGroup;
using ambidex::Worker;

namespace {

#define CHECK(condition)                                                       \
    do {                                                                       \
        if (!(condition)) {                                                    \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                      \
        }                                                                      \
    } while (0)

void nap(int microseconds) { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); }

// A cheap sequence of numbers that is the same in every run.
struct Numbers {
    uint32_t state;
    uint32_t below(uint32_t limit) {
        state = state * 1664525u + 1013904223u;
        return (state >> 8) % limit;
    }
};

// What a job of chunks works on. Nothing is atomic: a chunk that two workers take is a race.
struct Chunks {
    std::vector<int> done;
    int passes = 0;
    int nap_every = 0;  // one worker in a while sleeps, so that the others park at the barrier
};

void fill_chunks(void* data, Worker& worker) {
    Chunks& chunks = *static_cast<Chunks*>(data);
    for (int pass = 0; pass < chunks.passes; ++pass) {
        if (pass > 0) worker.barrier();
        if (chunks.nap_every > 0 && (pass + worker.id()) % chunks.nap_every == 0) nap(600);
        int64_t count = int64_t(chunks.done.size());
        for (int64_t i = worker.next(count); i >= 0; i = worker.next(count)) {
            CHECK(i < count);
            chunks.done[i] += 1;
        }
        worker.barrier();
        for (int value : chunks.done) CHECK(value == pass + 1);
    }
}

void test_chunks(int num_threads, int num_jobs) {
    ThreadGroup group(num_threads, {});
    Numbers numbers{uint32_t(num_threads)};
    for (int job = 0; job < num_jobs; ++job) {
        Chunks chunks;
        chunks.done.assign(numbers.below(70), 0);
        chunks.passes = int(1 + numbers.below(8));
        chunks.nap_every = job % 50 == 0 ? 3 : 0;
        group.run(fill_chunks, &chunks);
        for (int value : chunks.done) CHECK(value == chunks.passes);
        if (job % 40 == 0) nap(int(numbers.below(1500)));  // the workers park now and then
    }
}

// A worker's own share comes first, and comes in order.
void test_own_share_first() {
    ThreadGroup group(3, {});
    int64_t first[3] = {-1, -1, -1};
    auto job = [](void* data, Worker& worker) {
        static_cast<int64_t*>(data)[worker.id()] = worker.next(30);
        worker.barrier();
        while (worker.next(0) >= 0) CHECK(false);
    };
    group.run(job, first);
    for (int id = 0; id < 3; ++id) CHECK(first[id] == 10 * id);
}

struct Failure {
    int worker;
    int barriers_before;
};

void test_exceptions(int num_threads) {
    ThreadGroup group(num_threads, {});
    auto job = [](void* data, Worker& worker) {
        const Failure& failure = *static_cast<const Failure*>(data);
        for (int barrier = 0; barrier < 4; ++barrier) {
            bool last = failure.worker == -1;  // all of them
            if (barrier == failure.barriers_before && (last || worker.id() == failure.worker)) {
                throw std::runtime_error("worker failed");
            }
            while (worker.next(7) >= 0) {
            }
            worker.barrier();
        }
    };
    for (int round = 0; round < 30; ++round) {
        for (int worker = -1; worker < num_threads; ++worker) {
            Failure failure{worker, round % 4};
            bool caught = false;
            try {
                group.run(job, &failure);
            } catch (const std::runtime_error& error) {
                caught = std::string(error.what()) == "worker failed";
            }
            CHECK(caught);
            Chunks chunks;
            chunks.done.assign(11, 0);
            chunks.passes = 3;
            group.run(fill_chunks, &chunks);
        }
    }
}

void test_scratch(int num_threads) {
    ThreadGroup group(num_threads, {});
    auto ask = [](void* data, Worker& worker) {
        size_t num_bytes = *static_cast<size_t*>(data);
        if (worker.id() == worker.count() - 1) {
            std::memset(worker.scratch(num_bytes), 1, num_bytes);
            CHECK(reinterpret_cast<uintptr_t>(worker.scratch(1)) % 64 == 0);
        }
        worker.barrier();
    };
    size_t fine = 5000;
    group.run(ask, &fine);
    for (size_t too_much : {SIZE_MAX, SIZE_MAX / 2}) {
        bool caught = false;
        try {
            group.run(ask, &too_much);
        } catch (const std::bad_alloc&) {
            caught = true;
        }
        CHECK(caught);
        group.run(ask, &fine);
    }
    bool caught = false;
    try {
        group.reserve_shared(SIZE_MAX / 2);
    } catch (const std::bad_alloc&) {
        caught = true;
    }
    CHECK(caught);
    group.reserve_shared(100);
}

void test_many_groups() {
    auto add = [](void* data, Worker& worker) {
        static_cast<int*>(data)[worker.id() * 16] += 1;
    };
    for (int i = 0; i < 60; ++i) {
        int counts[64] = {};
        ThreadGroup group(1 + i % 4, {});
        for (int job = 0; job < i % 3; ++job) group.run(add, counts);
        if (i % 10 == 0) nap(800);
        for (int id = 0; id < group.size(); ++id) CHECK(counts[id * 16] == i % 3);
    }
}

void test_two_groups_at_once() {
    std::thread other([] { test_chunks(2, 150); });
    test_chunks(2, 150);
    other.join();
}

double cpu_s() {
    timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}

void test_idle() {
    ThreadGroup group(4, {});
    group.run([](void*, Worker& worker) { worker.barrier(); }, nullptr);
    nap(20000);
    double before = cpu_s();
    nap(300000);
    CHECK(cpu_s() - before < 0.02);
}

// Sanitizers do not follow a fork of a process with threads.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
void test_fork() {
    auto* group = new ThreadGroup(3, {});
    auto nothing = [](void*, Worker&) {};
    group->run(nothing, nullptr);
    pid_t child = fork();
    if (child == 0) {
        alarm(10);  // instead of waiting for ever
        bool refused = false;
        try {
            group->run(nothing, nullptr);
        } catch (const std::runtime_error&) {
            refused = true;
        }
        delete group;
        ThreadGroup own(2, {});
        own.run(nothing, nullptr);
        _exit(refused ? 0 : 1);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    group->run(nothing, nullptr);
    delete group;
}
#endif

}  // namespace

int main() {
    for (int num_threads = 1; num_threads <= 4; ++num_threads) {
        test_chunks(num_threads, 400);
        test_exceptions(num_threads);
        test_scratch(num_threads);
    }
    test_own_share_first();
    test_many_groups();
    test_two_groups_at_once();
    test_idle();
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
    test_fork();
#endif
    std::puts("pool_test: passed");
}
