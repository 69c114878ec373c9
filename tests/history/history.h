// A log of what clients did to the models of a server and what they were answered, and the check
// that some order of it all explains every answer.
//
// Times are any that all clients share, in nanoseconds. A version is a number from 1 on that a
// model's files have on disk; kNone is no version: the model is not loaded.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace awqd::history {

inline constexpr int kNone = 0;

// A load that ended well, of the version that lay on disk all the while, or an unload (kNone).
// Those that failed change nothing and are not noted.
struct Change {
  std::string model;
  int version = kNone;
  int64_t begin = 0, end = 0;
};

// What a call was answered with: the version whose result it is, bit for bit, or kNone for "not
// loaded". kWrong: of no version.
inline constexpr int kWrong = -1;
struct Answer {
  std::string model;
  int version = kWrong;
  int64_t begin = 0, end = 0;
  int client = 0;
};

// One line for each answer that cannot be: its version was at no moment between the call's begin
// and end that of its model. Empty when all can be. Models begin without a version.
//
// A change takes effect at some moment between its begin and end, and lasts until another one that
// begins after its end is over. So of two changes that overlap either may have come last.
std::vector<std::string> Impossible(const std::vector<Change>& changes,
                                    const std::vector<Answer>& answers);

}  // namespace awqd::history
