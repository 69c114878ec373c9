// Reading and skipping. Counts are compared with the bytes that are left before anything is done
// with them.
#include "kernels/checkpoint/containers/gguf_input.h"

#include <algorithm>

#include "kernels/base/status.h"

namespace awqd::model {
namespace {

constexpr int64_t kBufferBytes = 1 << 16;

// By number; 0 for what has no fixed size.
constexpr uint64_t kValueBytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
constexpr uint32_t kValueTypes = 13;

}  // namespace

GgufInput::GgufInput(const File* file, int64_t max_bytes, int max_array_depth)
    : file_(*file), end_(std::min(file->size(), max_bytes)), max_array_depth_(max_array_depth) {}

absl::Status GgufInput::TooShort(absl::string_view what, uint64_t bytes) const {
  return Invalid(
      what, ": got ", bytes, " bytes at ", position_, ", expected at most ", left(),
      end_ < file_.size() ? " (too much before the data)" : " (the rest of the file; truncated?)");
}

absl::Status GgufInput::ReadBytes(uint8_t* to, int64_t bytes, absl::string_view what) {
  if (bytes > left()) return TooShort(what, static_cast<uint64_t>(bytes));
  while (bytes > 0) {
    const int64_t buffered = buffer_at_ + static_cast<int64_t>(buffer_.size());
    if (position_ < buffer_at_ || position_ >= buffered) {
      buffer_.resize(static_cast<size_t>(std::min(kBufferBytes, left())));
      buffer_at_ = position_;
      AWQD_RETURN_IF_ERROR(file_.ReadAt(position_, absl::MakeSpan(buffer_)));
      continue;
    }
    const int64_t part = std::min(bytes, buffered - position_);
    std::memcpy(to, buffer_.data() + (position_ - buffer_at_), static_cast<size_t>(part));
    to += part;
    bytes -= part;
    position_ += part;
  }
  return absl::OkStatus();
}

absl::Status GgufInput::Skip(uint64_t bytes, absl::string_view what) {
  if (bytes > static_cast<uint64_t>(left())) return TooShort(what, bytes);
  position_ += static_cast<int64_t>(bytes);
  return absl::OkStatus();
}

absl::StatusOr<std::string> GgufInput::Text(uint64_t most, absl::string_view what) {
  AWQD_ASSIGN_OR_RETURN(const uint64_t length, Number<uint64_t>(what));
  if (length > static_cast<uint64_t>(left())) return TooShort(what, length);
  if (length > most) {
    return Invalid(what, ": got ", length, " bytes, expected at most ", most);
  }
  std::string out(length, '\0');
  AWQD_RETURN_IF_ERROR(
      ReadBytes(reinterpret_cast<uint8_t*>(out.data()), static_cast<int64_t>(length), what));
  return out;
}

absl::Status GgufInput::SkipValue(uint32_t type, int depth) {
  if (type >= kValueTypes) return Invalid("got type ", type, ", expected 0 to ", kValueTypes - 1);
  if (type == kGgufArray) return SkipArray(depth + 1);
  if (type != kGgufString) return Skip(kValueBytes[type], "value");
  AWQD_ASSIGN_OR_RETURN(const uint64_t length, Number<uint64_t>("string"));
  return Skip(length, "string");
}

absl::Status GgufInput::SkipArray(int depth) {
  if (depth > max_array_depth_) {
    return Invalid("got arrays nested deeper than ", max_array_depth_, ", the limit");
  }
  AWQD_ASSIGN_OR_RETURN(const uint32_t type, Number<uint32_t>("type of an array"));
  AWQD_ASSIGN_OR_RETURN(const uint64_t count, Number<uint64_t>("count of an array"));
  if (type >= kValueTypes)
    return Invalid("got an array of type ", type, ", expected 0 to ", kValueTypes - 1);
  // Strings and arrays take their lengths at least, so the loop below ends with the file.
  const uint64_t least = type == kGgufString ? 8 : type == kGgufArray ? 12 : kValueBytes[type];
  if (count > static_cast<uint64_t>(left()) / least) {
    return Invalid("array: got ", count, " values, expected at most ",
                   static_cast<uint64_t>(left()) / least, ", for which bytes are left");
  }
  if (kValueBytes[type] != 0) return Skip(count * kValueBytes[type], "array");
  for (uint64_t i = 0; i < count; ++i) AWQD_RETURN_IF_ERROR(SkipValue(type, depth));
  return absl::OkStatus();
}

}  // namespace awqd::model
