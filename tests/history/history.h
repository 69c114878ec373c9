// A log of the changes that clients made to the models of a server and of the answers to their
// calls, and the check that some order of it all explains every answer.
//
// Times are in nanoseconds of a clock that all clients share. A version is a number from 1 that a
// model's files have on disk; kNone means that the model is not loaded.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace awqd::history {

inline constexpr int kNone = 0;

// A successful load of the version that was on disk all the while, or an unload (kNone). Failed
// ones change nothing and are not recorded.
struct Change {
  std::string model;
  int version = kNone;
  int64_t begin = 0, end = 0;
};

// The answer of a call: the version whose result it is, bit for bit, or kNone for "not loaded".
// kWrong: of no version.
inline constexpr int kWrong = -1;
struct Answer {
  std::string model;
  int version = kWrong;
  int64_t begin = 0, end = 0;
  int client = 0;
};

// Returns one line for each impossible answer: at no moment between the call's begin and end was
// its version the model's. Empty if all answers are possible. Models begin without a version.
//
// A change takes effect at some moment between its begin and end, and lasts until another one that
// begins after that end is over. So of two overlapping changes either may have come last.
std::vector<std::string> Impossible(const std::vector<Change>& changes,
                                    const std::vector<Answer>& answers);

}  // namespace awqd::history
