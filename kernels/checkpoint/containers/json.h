// Strict JSON, with which every JSON text of a checkpoint is parsed.
//
// Stricter than RFC 8259 where leniency would let two readers see two documents: duplicate keys and
// NUL bytes are refused, nesting is bounded, text is valid UTF-8. Strings and numbers are at most
// 8 MiB long, and open objects have at most 200,000 keys together (a document: 1,000,000), so that
// a parse holds little more than what its events keep.
#pragma once

#include <atomic>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace awqd::model {

// Receives a document in order, and adds the rules that nlohmann's parser does not have. The first
// error ends the parse and is returned by it, UNAVAILABLE once `cancelled`.
class JsonEvents : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit JsonEvents(int max_depth, const std::atomic<bool>* cancelled = nullptr,
                      size_t max_open_keys = 200'000)
      : max_depth_(max_depth), cancelled_(cancelled), max_open_keys_(max_open_keys) {}

  // The first error of the parse so far.
  const absl::Status& status() const { return status_; }

 protected:
  virtual absl::Status StartObject() { return absl::OkStatus(); }
  virtual absl::Status Key(absl::string_view /*key*/) { return absl::OkStatus(); }
  virtual absl::Status EndObject() { return absl::OkStatus(); }
  virtual absl::Status StartArray() { return absl::OkStatus(); }
  virtual absl::Status EndArray() { return absl::OkStatus(); }
  // `number`: a whole one from 0 on. Any other value has neither a number nor a text.
  virtual absl::Status Scalar(const uint64_t* /*number*/, const std::string* /*text*/) {
    return absl::OkStatus();
  }
  // Whether the innermost open object has no such key yet. A reader that stores the keys of a large
  // object itself overrides it, so that they are not in memory twice.
  virtual absl::StatusOr<bool> IsNewKey(const std::string& key);

 private:
  // nlohmann's events. False ends the parse.
  bool null() final { return Keep(Scalar(nullptr, nullptr)); }
  bool boolean(bool) final { return null(); }
  bool number_integer(number_integer_t value) final {
    return value < 0 ? null() : number_unsigned(static_cast<uint64_t>(value));
  }
  bool number_unsigned(number_unsigned_t value) final { return Keep(Scalar(&value, nullptr)); }
  bool number_float(number_float_t, const string_t&) final { return null(); }
  bool string(string_t& value) final { return Keep(Scalar(nullptr, &value)); }
  bool binary(binary_t&) final { return null(); }  // which text never has
  bool start_object(size_t) final;
  bool key(string_t& value) final;
  bool end_object() final;
  bool start_array(size_t) final { return Enter() && Keep(StartArray()); }
  bool end_array() final;
  bool parse_error(size_t position, const std::string& token,
                   const nlohmann::detail::exception&) final;

  bool Keep(absl::Status status);
  bool Enter();

  const int max_depth_;
  const std::atomic<bool>* const cancelled_;
  const size_t max_open_keys_;
  int depth_ = 0;
  // One set per open object. Not Abseil's: that cannot be destroyed once it had no memory to grow.
  std::vector<std::unordered_set<std::string>> keys_;
  size_t open_keys_ = 0;  // in all of them
  absl::Status status_;
};

// The next piece of a text, which stays until the next call; empty at its end.
using NextPiece = absl::FunctionRef<absl::StatusOr<absl::string_view>()>;

// INVALID_ARGUMENT with the place of a syntax error, the duplicate key, the depth, or what `events`
// or `next` returned. Memory is bounded by the text's size.
absl::Status ParseJson(NextPiece next, JsonEvents* events);
absl::Status ParseJson(absl::string_view text, JsonEvents* events);

// A copy of the text in which the numbers that only Python's JSON has, NaN, Infinity and -Infinity,
// are strings. Nothing for a text that has none of them.
std::optional<std::string> QuotePythonNumbers(absl::string_view text);

// The keys of every object of a document; objects and keys as they follow one another.
using KeysInOrder = std::vector<std::vector<std::string>>;

// Parses a document whose top is an object, as Python's json module writes it: QuotePythonNumbers
// makes strings of its special numbers, which no reader of a number accepts. A document has at most 1,000,000 values. It sorts its keys: `keys`,
// which may be null, has them as they were.
absl::StatusOr<nlohmann::json> ParseJsonObject(absl::string_view text, int max_depth,
                                               KeysInOrder* keys = nullptr);

}  // namespace awqd::model
