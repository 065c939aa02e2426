// Faults inside the runner are thrown and become a code and one sentence at the C border.
#ifndef DEEPINFER_FAULT_H
#define DEEPINFER_FAULT_H
#include <string>

#include "abi.h"

struct Fault {
    int code;
    std::string sentence;
};

[[noreturn]] __attribute__((format(printf, 2, 3))) void fail(int code, const char* format, ...);

#endif
