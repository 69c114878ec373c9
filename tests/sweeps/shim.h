// Shared by the parts of the shim, a library that is preloaded into awqd and stands before the C
// library.
#pragma once

#include <dlfcn.h>

#include "tests/sweeps/control.h"

namespace awqd::sweeps {

// The page, or null where the test shares none.
Control* TheControl();

// Whether this call, one of `kind`, is the one that fails. Notes `function` as what failed.
bool Fails(Kind kind, const char* function);

// Sleeps when the test wants this thread to.
void MaybeStall();

// The function of that name that the shim stands before.
template <typename F>
F* Next(const char* name) {
  return reinterpret_cast<F*>(dlsym(RTLD_NEXT, name));
}

}  // namespace awqd::sweeps
