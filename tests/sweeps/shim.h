// Declarations for the parts of the shim, a library that is preloaded into awqd and precedes the C
// library.
#pragma once

#include <dlfcn.h>

#include "tests/sweeps/control.h"

namespace awqd::sweeps {

// The page, or null if the test shares none.
Control* TheControl();

// Whether this call, one of `kind`, must fail. Records `function` as the failed one.
bool Fails(Kind kind, const char* function);

// Sleeps if the test wants this thread to.
void MaybeStall();

// The C library's function that the shim replaces.
template <typename F>
F* Next(const char* name) {
  return reinterpret_cast<F*>(dlsym(RTLD_NEXT, name));
}

}  // namespace awqd::sweeps
