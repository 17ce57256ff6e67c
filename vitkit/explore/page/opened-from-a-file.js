// Not a module: browsers load no modules for a page that was opened from a file, and this page then says why.

if (location.protocol === "file:") {
  const message = document.getElementById("message");
  message.textContent = "This page was opened from a file. Browsers do not let such a page load its model and scripts. "
    + "Run  python -m http.server  in this folder and open  http://localhost:8000 , or put the folder on any web server.";
  message.hidden = false;
  document.getElementById("status").textContent = "Not running";
}
