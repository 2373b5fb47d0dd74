// The compiler: takes any program. Its kernels are in the driver's stand-in already.
#include "fail.h"
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>

namespace {
const int INTERNAL_ERROR = 11;

struct Program {
    std::string image, log;
    bool refused;
};
} // namespace

extern "C" {

int nvrtcVersion(int *major, int *minor) {
    *major = 13;
    *minor = 0;
    return 0;
}

int nvrtcCreateProgram(void **program, const char *source, const char *, int, const char *const *, const char *const *) {
    if (fails(__func__)) return INTERNAL_ERROR;
    std::string text = source;
    char image[64];
    std::snprintf(image, sizeof image, "stand-in cubin %zx", std::hash<std::string>{}(text));
    bool refused = text.find("#error stand-in") != std::string::npos;
    *program = new Program{image, refused ? "error: stand-in" : "", refused};
    return 0;
}

int nvrtcDestroyProgram(void **program) {
    delete static_cast<Program *>(*program);
    *program = nullptr;
    return 0;
}

int nvrtcCompileProgram(void *program, int, const char *const *) {
    if (fails(__func__)) return INTERNAL_ERROR;
    return static_cast<Program *>(program)->refused ? 6 : 0;
}

int nvrtcGetCUBINSize(void *program, size_t *size) {
    *size = static_cast<Program *>(program)->image.size() + 1;
    return 0;
}

int nvrtcGetCUBIN(void *program, char *image) {
    if (fails(__func__)) return INTERNAL_ERROR;
    std::strcpy(image, static_cast<Program *>(program)->image.c_str());
    return 0;
}

int nvrtcGetPTXSize(void *program, size_t *size) { return nvrtcGetCUBINSize(program, size); }
int nvrtcGetPTX(void *program, char *image) { return nvrtcGetCUBIN(program, image); }

int nvrtcGetProgramLogSize(void *program, size_t *size) {
    *size = static_cast<Program *>(program)->log.size() + 1;
    return 0;
}

int nvrtcGetProgramLog(void *program, char *log) {
    std::strcpy(log, static_cast<Program *>(program)->log.c_str());
    return 0;
}

const char *nvrtcGetErrorString(int error) { return error == 6 ? "NVRTC_ERROR_COMPILATION" : "an NVRTC error"; }

static const int ARCHS[] = {80, 86, 87, 89, 90, 100, 103, 120};

int nvrtcGetNumSupportedArchs(int *count) {
    *count = int(sizeof ARCHS / sizeof *ARCHS);
    return 0;
}

int nvrtcGetSupportedArchs(int *archs) {
    std::memcpy(archs, ARCHS, sizeof ARCHS);
    return 0;
}

} // extern "C"
