// Replaces readdir by a function of the test, for listings that fail or hang. One source of a
// binary includes it; the binary's own readdir then precedes the C library's.
#pragma once

#include <dirent.h>
#include <dlfcn.h>

#include <functional>

namespace awqd {

using ReadDirectory = dirent* (*)(DIR*);

// Empty: the C library's readdir. Change it only while nothing is being listed.
inline std::function<dirent*(DIR* directory, ReadDirectory real)>& ReaddirHook() {
  static std::function<dirent*(DIR*, ReadDirectory)> hook;
  return hook;
}

}  // namespace awqd

extern "C" dirent* readdir(DIR* directory) {
  static const auto real = reinterpret_cast<awqd::ReadDirectory>(dlsym(RTLD_NEXT, "readdir"));
  const auto& hook = awqd::ReaddirHook();
  return hook ? hook(directory, real) : real(directory);
}
