// FailingServer: the real awqd with the shim, on a repository with two models, and the checks of
// every sweep after a failure.
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
  // Creates a repository with models "m" and "other", and a server that has loaded both.
  explicit FailingServer(std::vector<std::string> args = {});
  ~FailingServer();

  Control& control() { return *control_; }
  ServerProcess& process() { return *process_; }
  client::Client& client() { return *client_; }
  const std::string& repository() const { return repository_.path(); }

  // Counts the calls of this kind that `body` makes, including the failing one.
  int64_t Count(Kind kind, absl::FunctionRef<void()> body);
  // Lets the `number`-th call fail. Returns whether there was such a call; control().where has its
  // function.
  bool FailAt(Kind kind, int64_t number, absl::FunctionRef<void()> body);

  bool alive() const;
  // Starts another server after the end of this one.
  void Restart();
  // Multiplies by "m" or "other"; the bytes must equal those of the first product.
  absl::Status Product(const std::string& model = "m");
  // Whether both models answer correctly within 10 s, with a new client if need be.
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
