// Failures on request in the libraries beside the driver: TUNESMITH_STAND_IN_FAIL=FUNCTION:N.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <string>

// Whether this call is the Nth one of the function that is to fail.
inline bool fails(const char *function) {
    static const std::string text = std::getenv("TUNESMITH_STAND_IN_FAIL") ? std::getenv("TUNESMITH_STAND_IN_FAIL") : "";
    static const size_t colon = text.find(':');
    static const uint64_t at = colon == std::string::npos ? 1 : std::strtoull(text.c_str() + colon + 1, nullptr, 10);
    static std::atomic<uint64_t> calls{0};
    return text.compare(0, colon, function) == 0 && ++calls == at;
}
