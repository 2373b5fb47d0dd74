// A stream of the stand-in: a thread that does what is queued, in order.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>

// Queues work on a stream; what it returns, if not 0, becomes the device's error. Called by cublasLt's stand-in too.
extern "C" void tunesmith_stand_in_enqueue(void *stream, std::function<int()> *work);

// The error of work that would use memory which is not live, or 0. `what` names the work.
extern "C" int tunesmith_stand_in_check(const char *what, uint64_t address, size_t bytes);

// The number of the calling thread's GPU, or -1 without one. Called by NCCL's stand-in.
extern "C" int tunesmith_stand_in_device();
