// A stream of the stand-in: a thread that does what is queued, in order.
#pragma once
#include <functional>

// Queues work on a stream; what it returns, if not 0, becomes the device's error. Called by cublasLt's stand-in too.
extern "C" void tunesmith_stand_in_enqueue(void *stream, std::function<int()> *work);
