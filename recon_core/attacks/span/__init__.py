"""The span attack: training images from a dense first layer's weights, by independence."""
