// Reads the header of a GGUF file from its beginning, a buffer at a time.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/checkpoint/file.h"

namespace awqd::model {

// Types of metadata that the reader asks about.
inline constexpr uint32_t kGgufUint16 = 2, kGgufUint32 = 4, kGgufString = 8, kGgufArray = 9;

// Errors are INVALID_ARGUMENT, "what: got ..., expected ...". Memory is bounded by the buffer and
// by the longest text that is asked for. `file` outlives it.
class GgufInput {
 public:
  // Nothing behind the first `max_bytes` is read.
  GgufInput(const File* file, int64_t max_bytes, int max_array_depth);

  int64_t position() const { return position_; }
  int64_t left() const { return end_ - position_; }  // bytes that may be read

  // A little-endian number.
  template <typename T>
  absl::StatusOr<T> Number(absl::string_view what) {
    uint8_t raw[sizeof(T)];
    if (absl::Status status = ReadBytes(raw, sizeof(T), what); !status.ok()) return status;
    T out = 0;
    std::memcpy(&out, raw, sizeof(T));
    return out;
  }
  // A length and as many bytes, at most `most`.
  absl::StatusOr<std::string> Text(uint64_t most, absl::string_view what);
  // A value of metadata of that type.
  absl::Status SkipValue(uint32_t type) { return SkipValue(type, 0); }

 private:
  absl::Status ReadBytes(uint8_t* to, int64_t bytes, absl::string_view what);
  absl::Status Skip(uint64_t bytes, absl::string_view what);
  absl::Status SkipValue(uint32_t type, int depth);
  absl::Status SkipArray(int depth);
  absl::Status TooShort(absl::string_view what, uint64_t bytes) const;

  const File& file_;
  const int64_t end_;
  const int max_array_depth_;
  int64_t position_ = 0;
  std::vector<uint8_t> buffer_;  // bytes of the file from buffer_at_ on
  int64_t buffer_at_ = 0;
};

}  // namespace awqd::model
