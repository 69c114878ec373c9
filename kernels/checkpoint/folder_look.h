// FolderLook: what a model's folder looks like from outside, to tell whether it has changed since
// it was last looked at, and whether somebody still writes to it.
#pragma once

#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/checkpoint/repository_root.h"

namespace awqd::model {

struct FolderLook {
  bool there = true;  // false: there is no such model
  // A line for each file that a model is made of: *.json, *.safetensors, *.gguf.
  std::string files;
  std::string others;  // the same of all others, among them what a download has not finished
  absl::Time changed = absl::InfinitePast();  // when any of them was last written to or replaced

  // Nothing was written between two looks that say the same.
  bool SameAs(const FolderLook& other) const {
    return there == other.there && files == other.files && others == other.others;
  }
};

// Of a folder, or of a file that is a model, beneath the root. Links are followed as RepositoryRoot
// does, so that one that is made to lead elsewhere is a change. Looks into folders of it down to
// where `hf download` keeps what is unfinished (.cache/huggingface/download); of a snapshot of a
// Hub cache also into the blobs beside it. A file is opened rather than only looked up: over NFS
// that is when a client asks the server for what is new. Takes 20,000 files of a folder into
// account at most.
FolderLook LookAt(const RepositoryRoot& root, absl::string_view path);

}  // namespace awqd::model
