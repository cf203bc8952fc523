// language_model: reads text with a pretrained language model, whose attention is full or Focus.

#include "program.hpp"

int main(int argc, char** argv) {
  return language_model::run_program(argc, argv);
}
