#include "team.h"

#include <exception>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// Between steps a helper looks for some 0.5 ms whether the next one has come, since to be woken takes 35 µs where a host
// has let its core sleep; meanwhile whoever else wants the core has it.
constexpr int LOOKS_BETWEEN_STEPS = 600, SPINS_A_LOOK = 20;

void give_way() {
    for (int i = 0; i < SPINS_A_LOOK; i++) relax();
    std::this_thread::yield();
}

void pin(std::thread& thread, int core) {
#if defined(__linux__)
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    pthread_setaffinity_np(thread.native_handle(), sizeof set, &set);  // a wish: without it results are the same
#else
    (void)thread;
    (void)core;
#endif
}

// Kernels are specified with subnormal numbers and rounding to nearest, whatever a library has set for its own.
class FloatRules {
public:
#if defined(__x86_64__)
    FloatRules() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
    ~FloatRules() { _mm_setcsr(before_); }

private:
    unsigned before_;
#endif
};

}  // namespace

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#else
    std::this_thread::yield();
#endif
}

void Signal::advance() {
    value_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst)) {
        std::lock_guard<std::mutex> lock(mutex_);
        changed_.notify_all();
    }
}

void Signal::sleep(uint32_t old) {
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    // Whoever advances after this line sees a sleeper, and notifies under the lock.
    changed_.wait(lock, [&] { return value_.load(std::memory_order_seq_cst) != old; });
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

Team::Team(int threads, const std::vector<int>& cores) : threads_(threads), holds_(threads) {
    try {
        for (int number = 1; number < threads; number++) {
            helpers_.emplace_back([this, number] { help(number); });
            if (int(cores.size()) == threads) pin(helpers_.back(), cores[number]);
        }
    } catch (...) {  // the system gives no more threads
        stop();
        throw;
    }
}

Team::~Team() { stop(); }

void Team::stop() {
    stopping_ = true;
    started_.advance();
    for (auto& helper : helpers_) helper.join();
}

void Team::hold(const Writers& writers) {
    std::vector<std::exception_ptr> refused(threads_);
    run([&](int number) {
        if (!number) return;  // the caller is another one each time
        try {
            holds_[number] = std::make_unique<Hold>(writers, Writers::HELPERS + number - 1);
        } catch (...) {
            refused[number] = std::current_exception();
        }
    });
    for (const std::exception_ptr& error : refused)
        if (error) std::rethrow_exception(error);
}

void Team::run(const std::function<void(int)>& job) {
    FloatRules rules;
    job_ = &job;
    if (threads_ > 1) started_.advance();
    job(0);
    barrier();
}

void Team::help(int number) {
    FloatRules rules;
    for (uint32_t seen = 0;; seen++) {
        started_.wait(seen, LOOKS_BETWEEN_STEPS, give_way);
        if (stopping_) {
            holds_[number].reset();
            return;
        }
        (*job_)(number);
        barrier();
    }
}

void Team::barrier() { barrier(relax); }
