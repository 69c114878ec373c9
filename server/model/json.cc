// Strict JSON on top of nlohmann's event parser.
#include "server/model/json.h"

#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "server/model/file.h"

namespace awqd::model {
namespace {

using Json = nlohmann::json;

// Adds the rules that nlohmann's parser does not have, then passes events on. Returning false from
// an event ends the parse.
class StrictEvents final : public nlohmann::json_sax<Json> {
 public:
  StrictEvents(int max_depth, JsonEvents* next) : max_depth_(max_depth), next_(next) {}

  const absl::Status& status() const { return status_; }

  bool null() override { return Pass({}); }
  bool boolean(bool) override { return Pass({.kind = JsonScalar::Kind::kBool}); }
  bool number_integer(number_integer_t value) override {
    return value < 0 ? Pass({.kind = JsonScalar::Kind::kNegative})
                     : number_unsigned(static_cast<uint64_t>(value));
  }
  bool number_unsigned(number_unsigned_t value) override {
    return Pass({.kind = JsonScalar::Kind::kUnsigned, .number = value});
  }
  bool number_float(number_float_t, const string_t&) override {
    return Pass({.kind = JsonScalar::Kind::kFloat});
  }
  bool string(string_t& value) override {
    return Pass({.kind = JsonScalar::Kind::kString, .text = value});
  }
  bool binary(binary_t&) override { return Keep(absl::InvalidArgumentError("binary value")); }

  bool start_object(size_t) override {
    if (!Enter()) return false;
    keys_.emplace_back();
    return next_ == nullptr || Keep(next_->StartObject());
  }
  bool key(string_t& value) override {
    if (!keys_.back().insert(value).second) {
      return Keep(absl::InvalidArgumentError(absl::StrCat("duplicate key ", Quoted(value))));
    }
    return next_ == nullptr || Keep(next_->Key(value));
  }
  bool end_object() override {
    --depth_;
    keys_.pop_back();
    return next_ == nullptr || Keep(next_->EndObject());
  }
  bool start_array(size_t) override {
    return Enter() && (next_ == nullptr || Keep(next_->StartArray()));
  }
  bool end_array() override {
    --depth_;
    return next_ == nullptr || Keep(next_->EndArray());
  }
  bool parse_error(size_t position, const std::string& token,
                   const nlohmann::detail::exception&) override {
    return Keep(absl::InvalidArgumentError(absl::StrCat(
        "not valid JSON in UTF-8 at byte ", position, " (near ", Quoted(token, 64), ")")));
  }

 private:
  bool Keep(absl::Status status) {
    if (status.ok()) return true;
    status_ = std::move(status);
    return false;
  }
  bool Pass(const JsonScalar& scalar) { return next_ == nullptr || Keep(next_->Scalar(scalar)); }
  bool Enter() {
    if (++depth_ <= max_depth_) return true;
    return Keep(absl::InvalidArgumentError(absl::StrCat("got JSON nested deeper than ", max_depth_,
                                                        " levels, expected at most that")));
  }

  const int max_depth_;
  JsonEvents* const next_;
  int depth_ = 0;
  std::vector<absl::flat_hash_set<std::string>> keys_;  // one set per open object
  absl::Status status_;
};

}  // namespace

absl::Status ParseJson(absl::string_view text, int max_depth, JsonEvents* events) {
  // The parser takes a NUL for the end of its input and would not see what follows.
  if (const size_t at = text.find('\0'); at != text.npos) {
    return absl::InvalidArgumentError(absl::StrCat("got a NUL byte in JSON at byte ", at));
  }
  StrictEvents strict(max_depth, events);
  const bool done = Json::sax_parse(text.begin(), text.end(), &strict);
  if (!strict.status().ok()) return strict.status();
  return done ? absl::OkStatus() : absl::InvalidArgumentError("not valid JSON");
}

absl::StatusOr<Json> ParseJsonObject(absl::string_view text, int max_depth) {
  AWQD_RETURN_IF_ERROR(ParseJson(text, max_depth, nullptr));
  Json out = Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (!out.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat("got a JSON ", out.type_name(), ", expected an object"));
  }
  return out;
}

}  // namespace awqd::model
