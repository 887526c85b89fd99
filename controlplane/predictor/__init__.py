"""The predictor: learns from what routers tell how long requests take."""
