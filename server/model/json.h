// Strict JSON: what every file of a checkpoint is parsed with.
//
// Stricter than RFC 8259 where leniency would let two readers see two documents: duplicate keys and
// NUL bytes are refused, nesting is bounded, text is valid UTF-8.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace awqd::model {

struct JsonScalar {
  enum class Kind { kNull, kBool, kUnsigned, kNegative, kFloat, kString };
  Kind kind = Kind::kNull;
  uint64_t number = 0;     // kUnsigned
  absl::string_view text;  // kString; valid during the call
};

// Receives a document in order. The first error ends the parse and is returned by it.
class JsonEvents {
 public:
  virtual ~JsonEvents() = default;
  virtual absl::Status StartObject() = 0;
  virtual absl::Status Key(absl::string_view key) = 0;
  virtual absl::Status EndObject() = 0;
  virtual absl::Status StartArray() = 0;
  virtual absl::Status EndArray() = 0;
  virtual absl::Status Scalar(const JsonScalar& scalar) = 0;
};

// INVALID_ARGUMENT with the place of a syntax error, the duplicate key, the depth, or what `events`
// returned. Memory is bounded by the text's size.
absl::Status ParseJson(absl::string_view text, int max_depth, JsonEvents* events);

// The same as a document; its top must be an object.
absl::StatusOr<nlohmann::json> ParseJsonObject(absl::string_view text, int max_depth);

}  // namespace awqd::model
