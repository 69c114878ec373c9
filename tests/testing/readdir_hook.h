// What the test decides that readdir does, for listings that break off or hang. Included by one
// source of a binary, whose own readdir then stands before the C library's.
#pragma once

#include <dirent.h>
#include <dlfcn.h>

#include <functional>

namespace awqd {

using ReadDirectory = dirent* (*)(DIR*);

// Empty: the C library's own. Changed only while nothing is being listed.
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
