// The table of layouts.
#include "kernels/layouts/k16.h"
#include "kernels/layouts/layout.h"
#include "kernels/layouts/mma16.h"
#include "kernels/layouts/plain.h"

namespace awqd {

absl::Span<const Layout* const> AllLayouts() {
  static const Layout* const layouts[] = {
      &kPlainLayout,
      &kK16Layout,
      &kMma16Layout,
  };
  return layouts;
}

const Layout* FindLayout(absl::string_view name) {
  for (const Layout* layout : AllLayouts()) {
    if (layout->name == name) return layout;
  }
  return nullptr;
}

}  // namespace awqd
