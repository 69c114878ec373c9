// FailingServer: the real awqd with the shim in it, on a repository with two models, and what every
// sweep asks of it after a failure.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "tests/e2e/server_process.h"
#include "tests/sweeps/control.h"

namespace awqd::sweeps {

// Not thread-safe.
class FailingServer {
 public:
  // A repository with models "m" and "other", and the server on it, which has loaded both.
  explicit FailingServer(std::vector<std::string> args = {});
  ~FailingServer();

  Control& control() { return *control_; }
  ServerProcess& process() { return *process_; }
  client::Client& client() { return *client_; }
  const std::string& repository() const { return repository_.path(); }

  // The calls of the kind that `body` makes, and of them the one that fails.
  int64_t Count(Kind kind, absl::FunctionRef<void()> body);
  // Whether it came to that; control().where says what failed.
  bool FailAt(Kind kind, int64_t number, absl::FunctionRef<void()> body);

  bool alive() const;
  // After its end: another one in its place.
  void Restart();
  // A product of "m" or "other": its bytes are those of the first one.
  absl::Status Product(const std::string& model = "m");
  // Both models answer, right, by a client of their own if need be; within 10 s.
  absl::Status IsWell();

 private:
  void Start();

  const std::vector<std::string> args_;
  TempFolder repository_, page_;
  Control* control_ = nullptr;
  std::string right_[2];  // FP16 [1, 64] of each model
  std::unique_ptr<ServerProcess> process_;
  std::unique_ptr<client::Client> client_;
};

}  // namespace awqd::sweeps
