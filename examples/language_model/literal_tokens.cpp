#include "literal_tokens.hpp"

namespace language_model {

void literal_tokens::add(std::string_view spelling, token_id id) {
  if (spelling.empty()) return;
  of_length& tokens = lengths_[spelling.size()];
  tokens.ids.emplace(spelling, id);
  tokens.begins[static_cast<unsigned char>(spelling.front())] = true;
}

std::vector<literal_tokens::piece> literal_tokens::split(std::string_view text) const {
  std::vector<piece> pieces;
  if (!text.empty()) pieces.push_back({text, std::nullopt});
  for (const auto& [length, tokens] : lengths_) {
    if (length > text.size()) continue;
    std::vector<piece> finer;
    for (const piece& p : pieces) {
      if (p.token) {
        finer.push_back(p);
        continue;
      }
      std::size_t done = 0, at = 0;
      const auto text_until = [&](std::size_t end) {
        if (end > done) finer.push_back({p.text.substr(done, end - done), std::nullopt});
      };
      while (at + length <= p.text.size()) {
        if (tokens.begins[static_cast<unsigned char>(p.text[at])]) {
          const auto found = tokens.ids.find(p.text.substr(at, length));
          if (found != tokens.ids.end()) {
            text_until(at);
            finer.push_back({p.text.substr(at, length), found->second});
            done = at += length;
            continue;
          }
        }
        ++at;
      }
      text_until(p.text.size());
    }
    pieces = std::move(finer);
  }
  return pieces;
}

}  // namespace language_model
