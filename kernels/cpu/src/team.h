// A few threads that do one thing together. They spin for a moment where they wait for each other, then sleep: on cores
// shared with other workers a thread that spins takes the time that the others wait for.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "writers.h"

// What a thread does that has nothing to do but to look again.
void relax();

// A number that goes up; who waits for it spins briefly, then sleeps.
class Signal {
public:
    uint32_t value() const { return value_.load(std::memory_order_acquire); }
    void advance();
    // Returns when the value is no longer `old`. `meanwhile` is called again and again, and takes a moment.
    template <typename Meanwhile>
    void wait(uint32_t old, int spins, Meanwhile meanwhile) {
        for (int i = 0; i < spins; i++) {
            if (value() != old) return;
            meanwhile();
        }
        sleep(old);
    }

private:
    void sleep(uint32_t old);

    alignas(64) std::atomic<uint32_t> value_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    std::mutex mutex_;
    std::condition_variable changed_;
};

class Team {
public:
    // `threads` includes the caller of run; helper i is pinned to cores[i] when cores has one for each thread.
    Team(int threads, const std::vector<int>& cores);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int threads() const { return threads_; }
    // Has each helper hold its slot from now on, as long as it lives; std::runtime_error when one cannot.
    void hold(const Writers& writers);
    // Calls job(0) here and job(1 … threads - 1) in the helpers; returns when all have returned.
    void run(const std::function<void(int)>& job);
    // For jobs: returns when every thread of the team has called it. Who waits does `meanwhile`.
    void barrier();
    template <typename Meanwhile>
    void barrier(Meanwhile meanwhile) {
        if (threads_ == 1) return;
        const uint32_t now = met_.value();
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            met_.advance();
        } else {
            met_.wait(now, SPINS_IN_STEP, meanwhile);
        }
    }

private:
    static constexpr int SPINS_IN_STEP = 4000;  // some 100 µs: phases differ by less, unless a thread lost its core

    void help(int number);
    void stop();

    const int threads_;
    const std::function<void(int)>* job_ = nullptr;
    bool stopping_ = false;
    Signal started_, met_;
    alignas(64) std::atomic<int> arrived_{0};
    std::vector<std::unique_ptr<Hold>> holds_;  // one a thread, made and ended by it
    std::vector<std::thread> helpers_;
};
