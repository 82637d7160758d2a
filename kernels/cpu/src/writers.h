// Robust mutexes in shared memory, held by threads that write pages: whoever reads them can tell that the last such thread
// is gone. transport/writers.py lays them out, and says what they prove.
#pragma once
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <system_error>

#if defined(__GLIBC__)
#include <unistd.h>
#endif

struct WriterSlot {
    union {
        pthread_mutex_t mutex;
        unsigned char room[48];
    };
    std::atomic<uint64_t> epoch;  // of who holds it, or held it last
    uint64_t unused;

    // Whether the main thread of this process holds it: its thread id is the process's.
    bool of_main_thread() const {
#if defined(__GLIBC__)
        constexpr int HOLDER = 0x3fffffff;  // of a robust mutex's lock word: FUTEX_TID_MASK in linux/futex.h
        return (__atomic_load_n(&mutex.__data.__lock, __ATOMIC_SEQ_CST) & HOLDER) == getpid();
#else
        return false;  // other C libraries keep it elsewhere
#endif
    }
};
#if defined(__GLIBC__)
static_assert(sizeof(WriterSlot) == 64 && offsetof(WriterSlot, epoch) == 48, "transport/writers.py has another layout");
#endif

// The slots of one incarnation of a worker.
struct Writers {
    WriterSlot* slots = nullptr;  // none: nobody looks
    uint64_t epoch = 0;

    static constexpr int MAIN = 0;     // the process's main thread, which holds it from before the first write to the end
    static constexpr int CALLER = 1;   // whoever calls a step, during the step
    static constexpr int HELPERS = 2;  // the first of those that live as long as their team
};

// A slot held by the thread that makes this, which also ends it. Never waits: std::runtime_error when another living thread
// holds the slot, or when the main thread is gone, for then others may have seen that nobody writes any more.
class Hold {
public:
    Hold(const Writers& writers, int slot) : slot_(writers.slots ? writers.slots + slot : nullptr) {
        if (!slot_) return;
        int code = pthread_mutex_trylock(&slot_->mutex);
#if defined(__GLIBC__)
        if (code == EOWNERDEAD) code = pthread_mutex_consistent(&slot_->mutex);
#endif
        if (code)
            throw std::runtime_error("writer's slot " + std::to_string(slot) +
                                     " cannot be held: " + std::generic_category().message(code));
        // Whoever reads that the main thread is gone, and then that this slot is free, must be right for good: the lock is
        // taken, for all to see, before the main thread's is read.
        std::atomic_thread_fence(std::memory_order_seq_cst);
        if (!writers.slots[Writers::MAIN].of_main_thread()) {
            pthread_mutex_unlock(&slot_->mutex);
            throw std::runtime_error("the main thread does not hold its writer's slot: no other thread may write pages");
        }
        slot_->epoch.store(writers.epoch, std::memory_order_release);
    }
    ~Hold() {
        if (slot_) pthread_mutex_unlock(&slot_->mutex);
    }
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

private:
    WriterSlot* const slot_;
};
