#include "ahead.h"

#include "abi.h"
#include "fault.h"

Ahead::~Ahead() {
    {
        std::lock_guard<std::mutex> hold(lock_);
        stop_ = true;
    }
    sent_.notify_all();
    if (thread_.joinable()) thread_.join();
}

void Ahead::send(std::function<void()> call) {
    if (!thread_.joinable()) thread_ = std::thread(&Ahead::make, this);
    {
        std::lock_guard<std::mutex> hold(lock_);
        calls_.push_back(std::move(call));
    }
    sent_.notify_one();
}

void Ahead::wait() {
    std::unique_lock<std::mutex> hold(lock_);
    if (calls_.empty() && results_.empty()) fail(DI_NOT_READY, "no step is in flight");
    ended_.wait(hold, [&] { return !results_.empty(); });
    const std::exception_ptr fault = results_.front();
    results_.pop_front();
    if (!fault) return;
    calls_.clear();
    failed_ = false;
    std::rethrow_exception(fault);
}

void Ahead::make() {
    std::unique_lock<std::mutex> hold(lock_);
    for (;;) {
        sent_.wait(hold, [&] { return stop_ || (!calls_.empty() && !failed_); });
        if (stop_) return;
        const std::function<void()> call = std::move(calls_.front());
        hold.unlock();
        std::exception_ptr fault;
        try {
            call();
        } catch (...) {
            fault = std::current_exception();
        }
        hold.lock();
        calls_.pop_front();
        failed_ = fault != nullptr;
        results_.push_back(fault);
        ended_.notify_one();
    }
}
