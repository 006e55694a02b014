// A cache-line-aligned buffer: a register load across two cache lines takes twice as long.
#pragma once

#include <cstddef>
#include <vector>

namespace qtk {

template <class Number>
class Lines {
 public:
  // Filled with zeros.
  explicit Lines(size_t size) : more_(size <= EACH ? 0 : (size + EACH - 1) / EACH) {}

  Number* data() { return (more_.empty() ? &one_ : more_.data())->numbers; }
  const Number* data() const { return (more_.empty() ? &one_ : more_.data())->numbers; }

 private:
  static constexpr size_t EACH = 64 / sizeof(Number);
  struct alignas(64) Line {
    Number numbers[EACH];
  };
  Line one_{};  // so that few numbers need no allocation
  std::vector<Line> more_;
};

}  // namespace qtk
